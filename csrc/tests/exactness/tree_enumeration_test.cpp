// A tree of draft tokens feeding the target is lossless, by exact enumeration: for trees of several
// shapes, with children that are the drafter's likeliest, or drawn from it, or both in one tree,
// the distribution of the text equals that of the target alone to 1e-12 in total variation, by the
// token rule and by the block rule, which also verifies several paths from the drafter. Then
// mistakes are planted, and must show.
#include <cstdio>
#include <string>
#include <vector>

#include "exactness/enumeration/paths.hpp"

namespace {

using namespace enumeration;

constexpr double kExact = 1e-12, kVisible = 0.01;

TreeShape shape(std::vector<int64_t> parents, const std::string& drawn) {
  TreeShape made{std::move(parents), {}};
  for (size_t i = 0; i <= made.parents.size(); ++i)
    made.drawn.push_back(drawn == "all" || (drawn != "none" && drawn[i] == 'd'));
  return made;
}

polyspec::SamplingParams sampling(float temperature, int64_t top_k, float top_p, float min_p) {
  polyspec::SamplingParams s;
  s.temperature.value = temperature;
  s.top_k.value = top_k;
  s.top_p.value = top_p;
  s.min_p.value = min_p;
  return s;
}

ToyTree toy(int64_t vocab, TreeShape shape, polyspec::SamplingParams s = {}, int eos = -1,
            double distance = 0.6, int hole_one_in = 0) {
  return {ToyModel(vocab, 11, 100, 0.0, hole_one_in),
          ToyModel(vocab, 11, 101, distance, hole_one_in), s, std::move(shape), eos};
}

void prove(const char* label, const ToyTree& tree, size_t length) {
  const bool block = tree.rule == polyspec::Rule::kBlock;
  TreeEnumerator enumerator(tree, block ? TreeRule(PathsFormula()) : recursive_residual());
  const TextDistribution texts = enumerator.texts(length);
  double mass = 0.0;
  for (const auto& [text, p] : texts) mass += p;
  const double tv = total_variation(texts, enumerator.target_texts(length));
  std::printf("%-44s TV %.1e, from the formulas %.1e, %4zu trees, %.3f tokens per round\n", label,
              tv, enumerator.worst_deviation(), enumerator.verifications(),
              enumerator.tokens_per_round(Text{0, 1}));
  std::fflush(stdout);
  CHECK_NEAR(1.0, mass, kExact);
  CHECK_BELOW(kExact, tv);
  CHECK_BELOW(kExact, enumerator.worst_deviation());
}

const std::vector<int64_t> kChain{-1, 0, 1}, kWide{-1, -1, -1}, kFork{-1, -1, 0, 0, 1},
    kUneven{-1, 0, -1, 0, 2, 1};

void prove_trees() {
  const auto all = sampling(1.4f, 3, 0.9f, 0.1f);
  prove("nothing drafted", toy(3, shape({}, "all")), 3);
  prove("chain, drawn", toy(3, shape(kChain, "all")), 5);
  prove("chain, likeliest", toy(3, shape(kChain, "none")), 5);
  prove("three siblings, drawn", toy(3, shape(kWide, "all")), 4);
  prove("three siblings, likeliest", toy(4, shape(kWide, "none")), 4);
  prove("fork, drawn", toy(2, shape(kFork, "all")), 5);
  prove("fork, drawn, 3 tokens", toy(3, shape({-1, -1, 0, 0}, "all")), 4);
  prove("fork, likeliest", toy(3, shape(kFork, "none")), 5);
  prove("uneven, likeliest", toy(4, shape(kUneven, "none")), 4);
  prove("uneven, drawn below a likeliest pair", toy(3, shape(kUneven, "lddllll")), 4);
  prove("uneven, likeliest below a drawn pair", toy(3, shape(kUneven, "dlldlll")), 4);
  prove("fork, drawn, temperature .6", toy(2, shape(kFork, "all"), sampling(0.6f, 0, 1, 0)), 5);
  prove("three siblings, drawn, top-k 2", toy(3, shape(kWide, "all"), sampling(1, 2, 1, 0)), 4);
  prove("three siblings, drawn, all filters", toy(4, shape(kWide, "all"), all), 3);
  prove("fork, mixed, all filters, EOS", toy(3, shape(kFork, "dldlll"), all, 2), 4);
  prove("uneven, likeliest, all filters, EOS", toy(4, shape(kUneven, "none"), all, 3), 4);
  prove("three siblings, drawn, logits of -inf", toy(3, shape(kWide, "all"), {}, -1, 0.6, 3), 4);
  prove("fork, drawn, greedy", toy(2, shape(kFork, "all"), sampling(0, 0, 1, 0)), 5);
  prove("uneven, mixed, greedy", toy(3, shape(kUneven, "lddllll"), sampling(0, 0, 1, 0)), 4);
  prove("three siblings, drawn from the target", toy(3, shape(kWide, "all"), {}, -1, 0.0), 4);
}

// Each of these changes the distribution of the text; the right formulas do not.
void catch_mutations() {
  const size_t length = 4;
  TreeEnumerator enumerator(toy(3, shape(kWide, "all"), {}, -1, 1.2));
  const TextDistribution target = enumerator.target_texts(length);
  CHECK_BELOW(kExact, total_variation(enumerator.texts(length, recursive_residual()), target));
  CHECK_BELOW(kExact, total_variation(enumerator.texts(length), target));
  const auto check = [&](const char* what, const TreeRule& rule) {
    const double tv = total_variation(enumerator.texts(length, rule), target);
    std::printf("mutation: %-52s TV %.3f\n", what, tv);
    CHECK_ABOVE(kVisible, tv);
  };
  check("the same p/q for every sibling (TensorRT-LLM)", same_ratio_for_siblings());
  check("no renormalisation between siblings", without_renormalisation());
  TreeEnumerator likeliest(toy(3, shape({-1, -1}, "none"), {}, -1, 1.2));
  const TextDistribution own = likeliest.target_texts(length);
  const double tv = total_variation(likeliest.texts(length, without_renormalisation()), own);
  std::printf("mutation: %-52s TV %.3f\n", "the same, likeliest children", tv);
  CHECK_ABOVE(kVisible, tv);
}

ToyTree by_blocks(ToyTree tree) {
  tree.rule = polyspec::Rule::kBlock;
  return tree;
}

// `count` paths of so many tokens, drawn from the drafter.
ToyTree paths(int64_t count, int64_t length, int64_t vocab, polyspec::SamplingParams s = {},
              double distance = 0.9, int eos = -1) {
  std::vector<int64_t> nodes(static_cast<size_t>(count * length), -1);
  ToyTree tree = toy(vocab, shape(std::move(nodes), "all"), s, eos, distance);
  tree.paths = count;
  return tree;
}

void prove_paths() {
  const auto all = sampling(1.4f, 3, 0.9f, 0.1f);
  prove("block rule: one path", by_blocks(paths(1, 4, 3)), 5);
  prove("block rule: two paths", by_blocks(paths(2, 2, 3)), 4);
  prove("block rule: two paths of three", by_blocks(paths(2, 3, 2)), 5);
  prove("block rule: three paths", by_blocks(paths(3, 2, 2)), 4);
  prove("block rule: three paths of one", by_blocks(paths(3, 1, 4)), 3);
  prove("block rule: four paths", by_blocks(paths(4, 2, 2, sampling(0.5f, 0, 1, 0))), 4);
  prove("block rule: two paths, far away", by_blocks(paths(2, 2, 3, {}, 3.0)), 4);
  prove("block rule: two paths of the target", by_blocks(paths(2, 2, 3, {}, 0.0)), 4);
  prove("block rule: two paths, all filters, EOS", by_blocks(paths(2, 2, 4, all, 0.9, 3)), 3);
  prove("block rule: two paths, greedy", by_blocks(paths(2, 2, 3, sampling(0, 0, 1, 0))), 4);
  prove("block rule: fork, drawn", by_blocks(toy(2, shape(kFork, "all"))), 5);
  prove("block rule: logits of -inf", by_blocks(toy(3, shape(kWide, "all"), {}, -1, 0.6, 3)), 4);
  prove("block rule: uneven, likeliest", by_blocks(toy(4, shape(kUneven, "none"))), 4);
  prove("block rule: drawn below a likeliest pair", by_blocks(toy(3, shape(kUneven, "lddllll"))),
        4);
  prove("block rule: likeliest below a drawn pair", by_blocks(toy(3, shape(kUneven, "dlldlll"))),
        4);
}

// More tokens per round than the token rule on the same paths, and than one path gives.
void compare_lengths() {
  for (int64_t count = 2; count <= 3; ++count) {
    const ToyTree tree = paths(count, 2, 3);
    const Text text{0, 1};
    const double token = TreeEnumerator(tree).tokens_per_round(text);
    const double block = TreeEnumerator(by_blocks(tree)).tokens_per_round(text);
    const double one = TreeEnumerator(by_blocks(paths(1, 2, 3))).tokens_per_round(text);
    std::printf("%d paths of 2: %.4f tokens per round, token rule %.4f, one path %.4f\n",
                static_cast<int>(count), block, token, one);
    CHECK_ABOVE(token, block);
    CHECK_ABOVE(one, block);
  }
}

void catch_mistakes_of_paths() {
  const auto check = [](const char* what, const PathsFormula& wrong, const ToyTree& tree) {
    const size_t length = tree.shape.parents.size() / static_cast<size_t>(tree.paths) + 1;
    TreeEnumerator enumerator(tree);
    const TextDistribution target = enumerator.target_texts(length);
    CHECK_BELOW(kExact, total_variation(enumerator.texts(length, PathsFormula()), target));
    const double tv = total_variation(enumerator.texts(length, wrong), target);
    std::printf("mutation: %-52s TV %.4f\n", what, tv);
    CHECK_ABOVE(0.002, tv);
  };
  PathsFormula laws, sums, order;
  laws.laws = false;
  sums.sums = false;
  order.in_order = false;
  check("siblings by bucket, tested as any draw from q", laws, by_blocks(paths(3, 2, 2)));
  check("s + R in place of s + (1 - w) + R", sums, by_blocks(paths(3, 2, 4)));
  check("equal siblings joined, their order lost", order, by_blocks(paths(4, 2, 3)));
}

}  // namespace

int main() {
  prove_trees();
  catch_mutations();
  prove_paths();
  compare_lengths();
  catch_mistakes_of_paths();
  return 0;
}
