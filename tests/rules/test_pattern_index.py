"""Many patterns: the index misses no match, and a rule with thousands decides as one with few would."""

import random
import re

import pytest
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.core.patterns import names
from shardrules.rules.pattern_index import MIN_PATTERNS, PatternIndex
from tests.zoo import f32

MESH = sr.mesh_shape("data:4,model:2")
SPECS = (P("data"), P(None, "model"), P("model", "data"), P())


def tree(count: int) -> dict[str, object]:
    return {"blocks": [{name: {"w": f32(8, 16), "b": f32(8, 8)} for name in ("up", "down")} for _ in range(count)]}


def patterns(count: int, seed: int) -> list[str]:
    random_state = random.Random(seed)

    def pattern() -> str:
        index, name, leaf = random_state.randrange(30), random_state.choice(["up", "down"]), random_state.choice("wb")
        return random_state.choice(
            [
                f"blocks/{index}/{name}/{leaf}",
                rf"^blocks/{index}/({name}|left)/{leaf}$",
                rf"{index}/\w+/{leaf}",
                rf"s/{index}/.*{leaf}",
                f"(?i)BLOCKS/{index}/{name}",
                f"blocks/{index}/up|blocks/{index}/down/{leaf}",
                f"{index}/{name}",
            ]
        )

    return [pattern() for _ in range(count)]


def test_candidates_are_ascending_and_miss_no_match() -> None:
    texts = patterns(300, 0)
    pattern_index = PatternIndex.of([names(text) for text in texts])
    candidate_count = 0
    for path in sr.leaf_paths(tree(30)):
        candidates = pattern_index.candidates(path)
        assert candidates == sorted(set(candidates))
        assert set(candidates) >= {index for index, text in enumerate(texts) if re.search(text, path)}
        candidate_count += len(candidates)
    assert candidate_count < 300 * 120 / 2


@pytest.mark.parametrize("match", ["search", "match", "fullmatch"])
@pytest.mark.parametrize("seed", range(3))
def test_many_patterns_decide_as_they_would_one_by_one(seed: int, match: str) -> None:
    texts = patterns(MIN_PATTERNS + 40, seed)
    values = [SPECS[index % 4] if index % 5 else sr.DimShardingRule("data", 0) for index in range(len(texts))]
    plan = sr.RegexShardingRule(list(zip(texts, values, strict=True)), match=match).plan(tree(30), MESH)
    matchers = [getattr(re.compile(text), match) for text in texts]
    won: set[int] = set()
    for path in plan.paths:
        winner = next((index for index, matches in enumerate(matchers) if matches(path)), None)
        decision = plan.decision(path)
        if winner is None:
            assert (decision.spec, decision.reason) == (None, "no pattern matches")
            continue
        won.add(winner)
        value = values[winner]
        assert decision.spec == (P("data", None) if isinstance(value, sr.ShardingRule) else value)
        assert repr(texts[winner]) in decision.reason
    idle = {finding.message: finding.code for finding in plan.findings if finding.code.endswith("-pattern")}
    for index, text in enumerate(texts):
        if index in won or any(texts[other] == text for other in won):
            continue
        matching = any(matchers[index](path) for path in plan.paths)
        code = "shadowed-pattern" if matching else "dead-pattern"
        assert any(repr(text) in message and reported == code for message, reported in idle.items())


def test_thousands_of_patterns_name_the_leaf_of_each() -> None:
    count = 2500
    names = ["up/w", "up/b", "down/w", "down/b"]
    rules = [(f"blocks/{index}/{name}$", SPECS[index % 4]) for index in range(count // 4) for name in names]
    plan = sr.RegexShardingRule(rules).plan(tree(count // 4), MESH)
    assert {plan.decision(f"blocks/{index}/down/b").spec for index in range(3, count // 4, 4)} == {P()}
    assert {plan.decision(f"blocks/{index}/up/w").spec for index in range(2, count // 4, 4)} == {P("model", "data")}
    assert not any(finding.code.endswith("-pattern") for finding in plan.findings)


def test_thousands_of_dead_patterns_are_all_reported() -> None:
    rules = [(f"absent/{index}/w", P()) for index in range(3000)]
    plan = sr.CompositeShardingRule(sr.RegexShardingRule(rules), sr.RegexShardingRule(rules)).plan(tree(2), MESH)
    assert sum(finding.code == "dead-pattern" for finding in plan.findings) == 3000
