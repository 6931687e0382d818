#include "hopshard/comm/process_groups.hpp"

#include <algorithm>
#include <iterator>
#include <set>

#include "hopshard/core/error.hpp"

namespace hopshard {
namespace {

/// "[0-3]" for neighbours, "[1,5,9]" for others, shortened to "[1,5,..,61]" beyond four.
std::string describe_ranks(const std::vector<int>& ranks) {
  const int first = ranks.front();
  const int last = ranks.back();
  if (ranks.size() > 2 && last - first + 1 == static_cast<int>(ranks.size())) {
    return detail::concatenate("[", first, "-", last, "]");
  }
  if (ranks.size() > 4) {
    return detail::concatenate("[", first, ",", ranks[1], ",..,", last, "]");
  }
  std::string text;
  for (const int rank : ranks) {
    text += detail::concatenate(text.empty() ? "" : ",", rank);
  }
  return "[" + text + "]";
}

Group make_group(std::string_view kind, const GroupLayout& layout, int rank,
                 std::vector<int> ranks) {
  const auto me = std::find(ranks.begin(), ranks.end(), rank);
  HOPSHARD_CHECK(me != ranks.end(), InvalidArgument, "rank ", rank, " is not in the ", kind,
                 " group ", describe_ranks(ranks), " of a world of ", layout.world_size());
  Group group;
  group.rank = static_cast<int>(std::distance(ranks.begin(), me));
  group.name = std::string(kind) + describe_ranks(ranks);
  group.ranks = std::move(ranks);
  return group;
}

void check_rank(const GroupLayout& layout, int rank) {
  HOPSHARD_CHECK(rank >= 0 && rank < layout.world_size(), InvalidArgument, "rank ", rank,
                 " is not in a world of ", layout.world_size(), " (0..", layout.world_size() - 1,
                 ")");
}

CommunicatorPtr make_checked(const CommunicatorFactory& factory, const Group& group) {
  CommunicatorPtr made = factory(group);
  HOPSHARD_CHECK(made != nullptr, ConfigError, "the communicator factory returned none for group '",
                 group.name, "'; it must return a communicator for each of its rank's groups");
  HOPSHARD_CHECK(made->group().ranks == group.ranks && made->rank() == group.rank, InvalidArgument,
                 "the communicator factory was asked for group '", group.name, "' (rank ",
                 group.rank, " of ", group.size(), ") but returned one for '", made->group().name,
                 "' (rank ", made->rank(), " of ", made->size(), ")");
  bool same_slots = true;
  for (int member = 0; member < group.size(); ++member) {
    same_slots = same_slots && made->group().slot_of(member) == group.slot_of(member);
  }
  HOPSHARD_CHECK(same_slots, InvalidArgument,
                 "the communicator factory dropped the slots of group '", group.name,
                 "'; pass the Group on unchanged");
  return made;
}

Group make_sliced_group(std::string_view kind, const GroupLayout& layout, int rank) {
  check_rank(layout, rank);
  Group group = make_group(kind, layout, rank, layout.sharding_group(rank));
  for (const int member : group.ranks) {
    group.slots.push_back(layout.slice_of(member));
  }
  if (group.has_identity_slots()) {
    group.slots.clear();
  }
  group.validate();
  return group;
}

}  // namespace

Group make_world_group(const GroupLayout& layout, int rank) {
  check_rank(layout, rank);
  std::vector<int> ranks(static_cast<std::size_t>(layout.world_size()));
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    ranks[i] = static_cast<int>(i);
  }
  return make_group("world", layout, rank, std::move(ranks));
}

Group make_sharding_group(const GroupLayout& layout, int rank) {
  return make_sliced_group("sharding", layout, rank);
}

Group make_secondary_group(const GroupLayout& layout, int rank, int degree) {
  HOPSHARD_CHECK(degree >= 1 && layout.degree() % degree == 0, ConfigError,
                 "secondary shards over ", degree, " ranks do not fit sharding groups of ",
                 layout.degree(), ": it must divide them");
  return make_sliced_group("secondary",
                           GroupLayout(layout.world_size(), layout.ranks_per_node(), degree), rank);
}

Group make_replication_group(const GroupLayout& layout, int rank) {
  check_rank(layout, rank);
  return make_group("replication", layout, rank, layout.replication_group(rank));
}

std::optional<NodeParts> plan_node_parts(const Group& group, int ranks_per_node) {
  group.validate();
  HOPSHARD_CHECK(ranks_per_node >= 1, InvalidArgument, "ranks_per_node must be at least 1, got ",
                 ranks_per_node);
  const auto node_of = [&](std::size_t member) { return group.ranks[member] / ranks_per_node; };
  const std::size_t size = group.ranks.size();
  std::size_t k = 1;
  while (k < size && node_of(k) == node_of(0)) {
    ++k;
  }
  if (k < 2 || k == size || size % k != 0) {
    return std::nullopt;
  }
  std::set<int> nodes;
  for (std::size_t member = 0; member < size; ++member) {
    if (node_of(member) != node_of(member - member % k)) {
      return std::nullopt;
    }
    nodes.insert(node_of(member));
  }
  if (nodes.size() != size / k) {
    return std::nullopt;  // A node's members are not neighbours in the group.
  }
  const auto me = static_cast<std::size_t>(group.rank);
  NodeParts parts;
  parts.num_nodes = static_cast<int>(size / k);
  parts.ranks_per_node = static_cast<int>(k);
  for (std::size_t member = 0; member < size; ++member) {
    if (member / k == me / k) {
      parts.intra_node.ranks.push_back(group.ranks[member]);
    }
    if (member % k == me % k) {
      parts.inter_node.ranks.push_back(group.ranks[member]);
    }
  }
  const std::string kind = group.name.substr(0, group.name.find('['));
  parts.intra_node.rank = static_cast<int>(me % k);
  parts.intra_node.name = kind + "_intra_node" + describe_ranks(parts.intra_node.ranks);
  parts.inter_node.rank = static_cast<int>(me / k);
  parts.inter_node.name = kind + "_inter_node" + describe_ranks(parts.inter_node.ranks);
  return parts;
}

ProcessGroups make_process_groups(const GroupLayout& layout, int rank,
                                  const CommunicatorFactory& factory, int secondary_degree) {
  ProcessGroups groups;
  groups.world = make_checked(factory, make_world_group(layout, rank));
  groups.sharding = make_checked(factory, make_sharding_group(layout, rank));
  groups.replication = make_checked(factory, make_replication_group(layout, rank));
  if (secondary_degree > 0) {
    groups.secondary = make_checked(factory, make_secondary_group(layout, rank, secondary_degree));
  }
  return groups;
}

}  // namespace hopshard
