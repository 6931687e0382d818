// Two levels over `local`, with nodes of two ranks, behind a communicator that falls back to a flat
// one where two levels do not apply: so any group will do.
#include "backends.hpp"
#include "hopshard/collectives/hierarchical_communicator.hpp"
#include "hopshard/collectives/select.hpp"
#include "hopshard/comm/decorators.hpp"
#include "hopshard/comm/process_groups.hpp"

namespace hopshard::testing {
namespace {

constexpr int kRanksPerNode = 2;

CommunicatorPtr make_selecting(ThreadWorld& world, const Group& group, Selection selection,
                               std::chrono::microseconds max_delay) {
  SelectOptions options;
  options.selection = selection;
  options.store = world.store();
  // On 2 x 2 ranks two levels up to 1000 bytes, flat beyond: both take part.
  options.costs = {.intra_node = {.alpha_us = 1, .gb_per_s = 0.01},
                   .inter_node = {.alpha_us = 13, .gb_per_s = 0.01}};
  CommunicatorPtr flat = world.communicator(group);
  CommunicatorPtr hierarchical;
  if (const std::optional<NodeParts> parts = plan_node_parts(group, kRanksPerNode)) {
    options.shape = {.num_nodes = parts->num_nodes, .ranks_per_node = parts->ranks_per_node};
    if (group.has_identity_slots() || has_slice_order(group, parts->num_nodes, kRanksPerNode)) {
      const auto make_inner = [&](const Group& part) {
        CommunicatorPtr inner = world.communicator(part);
        return max_delay.count() == 0
                   ? inner
                   : make_delayed_communicator(inner, {.seed = 11, .max_delay = max_delay});
      };
      hierarchical =
          make_hierarchical_communicator(group, make_inner(parts->intra_node),
                                         make_inner(parts->inter_node), {.store = world.store()});
    }
  }
  return make_selecting_communicator(flat, hierarchical, options);
}

}  // namespace

std::vector<Backend> hierarchical_backends() {
  using std::chrono::microseconds;
  return {
      {.name = "hierarchical",
       .make =
           [](ThreadWorld& world, const Group& group) {
             return make_selecting(world, group, Selection::kHierarchical, microseconds{0});
           },
       .is_composite = true},
      {.name = "hierarchical_delayed",
       .make =
           [](ThreadWorld& world, const Group& group) {
             return make_selecting(world, group, Selection::kHierarchical, microseconds{200});
           },
       .is_composite = true,
       .is_variant = true},
      {.name = "selecting",
       .make =
           [](ThreadWorld& world, const Group& group) {
             return make_selecting(world, group, Selection::kByCost, microseconds{0});
           },
       .is_composite = true},
  };
}

}  // namespace hopshard::testing
