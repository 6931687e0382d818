#include "hopshard/core/env.hpp"

#include <gtest/gtest.h>

#include <map>
#include <set>

#include "hopshard/core/error.hpp"

namespace hopshard {
namespace {

EnvLookup from(std::map<std::string, std::string, std::less<>> values) {
  return [values = std::move(values)](std::string_view name) -> std::optional<std::string> {
    const auto found = values.find(name);
    return found == values.end() ? std::nullopt : std::optional(found->second);
  };
}

TEST(ParseEnv, NothingSetYieldsTheDefaults) {
  const Env parsed = parse_env(from({}));
  EXPECT_EQ(parsed.log_level, LogLevel::kInfo);
  EXPECT_EQ(parsed.timeout, std::chrono::seconds(300));
  EXPECT_FALSE(parsed.ranks_per_node.has_value());
}

TEST(ParseEnv, EmptyCountsAsNotSet) {
  const Env parsed = parse_env(from({{"HOPSHARD_TIMEOUT_S", ""}, {"HOPSHARD_RANKS_PER_NODE", ""}}));
  EXPECT_EQ(parsed.timeout, Env{}.timeout);
  EXPECT_FALSE(parsed.ranks_per_node.has_value());
}

TEST(ParseEnv, ReadsLegalValues) {
  const Env parsed = parse_env(from({{"HOPSHARD_LOG_LEVEL", "debug"},
                                     {"HOPSHARD_TIMEOUT_S", "1.5"},
                                     {"HOPSHARD_RANKS_PER_NODE", "4"},
                                     {"HOPSHARD_BACKEND", "shm+c10d"},
                                     {"HOPSHARD_NODE_ID", "rack 3"},
                                     {"HOPSHARD_LINK_COSTS", "costs.json"}}));
  EXPECT_EQ(parsed.log_level, LogLevel::kDebug);
  EXPECT_EQ(parsed.timeout, std::chrono::milliseconds(1500));
  EXPECT_EQ(parsed.ranks_per_node, 4);
  EXPECT_EQ(parsed.backend, "shm+c10d");
  EXPECT_EQ(parsed.node_id, "rack 3");
  EXPECT_EQ(parsed.link_costs, "costs.json");
}

TEST(ParseEnv, AVeryShortTimeoutIsNotRoundedToZero) {
  EXPECT_EQ(parse_env(from({{"HOPSHARD_TIMEOUT_S", "1e-6"}})).timeout,
            std::chrono::milliseconds(1));
}

struct Illegal {
  const char* name;
  const char* value;
};

class ParseEnvRejects : public testing::TestWithParam<Illegal> {};

TEST_P(ParseEnvRejects, NamingVariableAndValue) {
  const auto [name, value] = GetParam();
  try {
    static_cast<void>(parse_env(from({{name, value}})));
    FAIL() << name << '=' << value << " was accepted";
  } catch (const ConfigError& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find(name), std::string::npos) << text;
    EXPECT_NE(text.find(value), std::string::npos) << text;
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, ParseEnvRejects,
    testing::Values(Illegal{"HOPSHARD_LOG_LEVEL", "loud"}, Illegal{"HOPSHARD_LOG_LEVEL", "INFO"},
                    Illegal{"HOPSHARD_TIMEOUT_S", "0"}, Illegal{"HOPSHARD_TIMEOUT_S", "-1"},
                    Illegal{"HOPSHARD_TIMEOUT_S", "5s"}, Illegal{"HOPSHARD_TIMEOUT_S", "nan"},
                    Illegal{"HOPSHARD_TIMEOUT_S", "inf"}, Illegal{"HOPSHARD_TIMEOUT_S", "1e300"},
                    Illegal{"HOPSHARD_RANKS_PER_NODE", "0"},
                    Illegal{"HOPSHARD_RANKS_PER_NODE", "2.5"},
                    Illegal{"HOPSHARD_RANKS_PER_NODE", "99999999999"},
                    Illegal{"HOPSHARD_RANKS_PER_NODE", " 2"}));

TEST(EnvVariables, AreUniqueAndSaidToBeOurs) {
  std::set<std::string_view> names;
  for (const EnvVariable& variable : env_variables()) {
    EXPECT_TRUE(variable.name.starts_with("HOPSHARD_"));
    EXPECT_TRUE(names.insert(variable.name).second) << variable.name;
    EXPECT_FALSE(variable.meaning.empty());
  }
}

}  // namespace
}  // namespace hopshard
