"""Which prompt comes next: by success, by difficulty, by a mixture that changes; the same after a resume."""

import json
import math
import random
from itertools import chain, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rlhf_algos import DataSource
from rlhf_core import ConfigError, DataError
from rlhf_launch.config.curriculum import CurriculumSection, EasyToHard, MixturePoint
from rlhf_launch.config.data import OnlineDataSection
from rlhf_launch.samples.curriculum import CurriculumStream
from rlhf_launch.samples.ledger import Ledger, LedgerLimits
from rlhf_launch.samples.producer import Producer, ProducerConfig
from rlhf_launch.samples.prompts import Prompt, PromptSets, PromptStream
from rlhf_launch.workers.waits import Waits


def prompts_of(levels):
    return [
        Prompt(prompt_id=str(i), text=str(i), token_ids=(5, i), metadata={"level": level})
        for i, level in enumerate(levels)
    ]


def stream(rules, sizes=(12,), *, levels=None, seed=0, weights=None, names=()):
    levels = list(range(sum(sizes))) if levels is None else levels
    sets = PromptSets(prompts=prompts_of(levels), sizes=tuple(sizes), weights=weights or tuple(map(float, sizes)))
    return CurriculumStream(sets, rules, seed=seed, names=names, data="rows.jsonl")


def take_step(curriculum, count, score):
    """One step: draw, score, settle; the ids drawn and the metrics."""
    begin = curriculum.position
    drawn = [int(prompt.prompt_id) for prompt in curriculum.take(count)]
    for position, index in enumerate(drawn, begin):
        curriculum.note(position, score(index))
    return drawn, curriculum.settle(range(begin, begin + count))


RULES = {
    "target": CurriculumSection(target_success_rate=0.5),
    "cooldown": CurriculumSection(cooldown_steps=3),
    "difficulty": CurriculumSection(difficulty=EasyToHard(column="level", steps=5, start=0.3)),
    "mixture": CurriculumSection(
        mixture=(MixturePoint(step=0, weights=(1.0, 0.0)), MixturePoint(step=4, weights=(0.2, 0.8)))
    ),
    "all": CurriculumSection(
        target_success_rate=0.4,
        cooldown_steps=2,
        difficulty=EasyToHard(column="level", steps=6),
        mixture=(MixturePoint(step=2, weights=(3.0, 1.0)),),
    ),
}


@settings(max_examples=60, deadline=None)
@given(
    rules=st.sampled_from(sorted(RULES)),
    seed=st.integers(0, 2**31),
    sizes=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    counts=st.lists(st.integers(1, 6), min_size=1, max_size=8),
    cut=st.integers(0, 8),
    data=st.data(),
)
def test_a_stream_that_was_saved_at_any_step_goes_on_as_if_it_had_not_been(rules, seed, sizes, counts, cut, data):
    outcomes = st.lists(st.sampled_from([0.0, 1.0]), min_size=2, max_size=4)
    table = [data.draw(outcomes) for _ in range(sum(sizes))]
    whole = stream(RULES[rules], sizes, seed=seed)
    expected = [take_step(whole, count, table.__getitem__) for count in counts]
    first = stream(RULES[rules], sizes, seed=seed)
    found = [take_step(first, count, table.__getitem__) for count in counts[:cut]]
    state = json.loads(json.dumps(first.state()))
    resumed = stream(RULES[rules], sizes, seed=seed)
    resumed.take(3)  # what went on before is forgotten
    resumed.position = first.position
    resumed.restore(state)
    found += [take_step(resumed, count, table.__getitem__) for count in counts[cut:]]
    assert found == expected
    assert resumed.state() == whole.state()


@given(order=st.permutations(range(6)), seed=st.integers(0, 99))
def test_the_order_in_which_samples_arrive_has_no_influence(order, seed):
    rules = CurriculumSection(target_success_rate=0.5, cooldown_steps=1)
    ways = [stream(rules, seed=seed) for _ in range(2)]
    for curriculum, arrived in zip(ways, (range(6), order), strict=True):
        curriculum.take(6)
        for position in arrived:
            curriculum.note(position, [float(position % 2), float(position % 3 == 0)])
        curriculum.settle(reversed(arrived) if arrived is order else arrived)
    assert ways[0].state() == ways[1].state()
    assert [p.prompt_id for p in ways[0].take(9)] == [p.prompt_id for p in ways[1].take(9)]


def test_a_position_keeps_its_prompt_until_it_is_settled_and_after_a_resume():
    """Samples of a prompt in flight are drawn again at its position, whatever is known by then."""
    curriculum = stream(CurriculumSection(target_success_rate=0.5))
    drawn = [prompt.prompt_id for prompt in curriculum.take(6)]
    for position in range(3):
        curriculum.note(position, [1.0, 1.0])
    curriculum.settle(range(3))
    resumed = stream(CurriculumSection(target_success_rate=0.5))
    resumed.restore(json.loads(json.dumps(curriculum.state())))
    resumed.position = curriculum.position
    for one in (curriculum, resumed):
        assert [one.at(position).prompt_id for position in (3, 4, 5)] == drawn[3:]


def test_without_a_target_every_prompt_comes_once_before_any_comes_again():
    curriculum = stream(CurriculumSection(cooldown_steps=1), sizes=(12,))
    seen = [take_step(curriculum, 4, lambda i: [0.0, 1.0])[0] for _ in range(6)]
    assert sorted(chain(*seen[:3])) == sorted(chain(*seen[3:])) == list(range(12))
    assert seen[:3] != seen[3:]
    assert curriculum.passes == 2


def test_what_scores_alike_rests_and_comes_back():
    curriculum = stream(CurriculumSection(cooldown_steps=2), sizes=(6,))
    solved = {0, 3}
    steps = [take_step(curriculum, 2, lambda i: [1.0, 1.0 - (i not in solved)]) for _ in range(12)]
    for index in solved:
        visits = [number for number, (drawn, _) in enumerate(steps) if index in drawn]
        assert len(visits) > 1
        assert all(later - earlier > 2 for earlier, later in pairwise(visits))
    assert {metrics["curriculum/resting"] for _, metrics in steps} >= {1 / 6}


def test_where_all_rest_the_one_that_rested_longest_comes():
    curriculum = stream(CurriculumSection(cooldown_steps=50), sizes=(4,))
    steps = [take_step(curriculum, 2, lambda i: [1.0, 1.0])[0] for _ in range(4)]
    assert sorted(steps[0] + steps[1]) == [0, 1, 2, 3]
    assert sorted(steps[2]) == sorted(steps[0])
    assert sorted(steps[3]) == sorted(steps[1])


def test_no_prompt_is_twice_in_a_step_while_there_are_others():
    for seed in range(20):
        curriculum = stream(CurriculumSection(target_success_rate=0.5), sizes=(4, 4), seed=seed, weights=(1.0, 1.0))
        drawn, _ = take_step(curriculum, 4, lambda i: [0.0, 1.0])
        assert len(set(drawn)) == 4


def test_draws_move_towards_the_target():
    """Of 40 prompts with fixed success rates 0, 0.25, ..., 1, those near 0.5 come most, and none is given up."""
    rate = {i: (i % 5) / 4 for i in range(40)}
    curriculum = stream(CurriculumSection(target_success_rate=0.5), sizes=(40,))
    drawn = [take_step(curriculum, 8, lambda i: [1.0] * (i % 5) + [0.0] * (4 - i % 5))[0] for _ in range(150)]
    late = [rate[i] for step in drawn[15:] for i in step]
    shares = {r: sum(x == r for x in late) / len(late) for r in sorted(set(rate.values()))}
    # weights of 0.05, 0.25, 1, 0.25 and 0.05, where no prompt comes twice in a step
    assert shares[0.5] > 0.5
    assert shares[0.5] > 2 * shares[0.25] > 2 * shares[0.0] > 0


def test_a_rate_is_an_average_that_decays():
    curriculum = stream(CurriculumSection(target_success_rate=0.5, decay=0.75), sizes=(1,))
    for scores in ([1.0, 1.0], [0.0, 0.0], [1.0, 0.0, 0.2, 0.6]):
        take_step(curriculum, 1, lambda i, scores=scores: scores)
    ((_, draws, rate, _),) = json.loads(curriculum.state()["prompts"])
    assert draws == 3
    assert rate == pytest.approx(0.75 * (0.75 * 1.0 + 0.25 * 0.0) + 0.25 * 0.5)


def test_easy_prompts_open_first():
    rules = CurriculumSection(difficulty=EasyToHard(column="level", steps=4, start=0.25))
    levels = [float(level) for level in reversed(range(16))]
    curriculum = stream(rules, sizes=(16,), levels=levels)
    steps = [take_step(curriculum, 4, lambda i: [0.0, 1.0]) for _ in range(8)]
    hardest = [max(levels[i] for i in drawn) for drawn, _ in steps]
    opened = [metrics["curriculum/open"] for _, metrics in steps]  # after the step
    assert hardest[0] == 3.0  # a quarter of sixteen is open, and all of it is drawn
    assert all(h < math.ceil(16 * share) for h, share in zip(hardest, [0.25, *opened], strict=False))
    assert opened == pytest.approx([0.4375, 0.625, 0.8125, 1, 1, 1, 1, 1])
    means = [metrics["curriculum/difficulty"] for _, metrics in steps]
    assert means[0] == 1.5
    assert sum(means[4:]) > 2 * sum(means[:4]) * 0.75


def test_the_mixture_changes_linearly():
    points = (MixturePoint(step=0, weights=(1.0, 0.0)), MixturePoint(step=100, weights=(0.0, 1.0)))
    curriculum = stream(CurriculumSection(mixture=points), sizes=(50, 50), names=("easy", "hard"))
    shares = [take_step(curriculum, 20, lambda i: [0.0, 1.0])[1]["curriculum/share/hard"] for _ in range(120)]
    assert shares[0] == 0.0
    for begin in (0, 25, 50, 75):
        assert sum(shares[begin : begin + 25]) / 25 == pytest.approx((begin + 12) / 100, abs=0.08)
    assert shares[100:] == [1.0] * 20


def test_a_curriculum_of_success_learns_more_than_draws_at_random():
    """A synthetic learner: success of sigmoid(skill - difficulty), and skill that grows by the variance of success,
    which is what a group of samples teaches."""

    def skill_after(steps, draw):
        skill = 0.0
        for _ in range(steps):
            rates = {i: 1 / (1 + math.exp(-(skill - levels[i]))) for i in range(200)}
            skill += sum(0.02 * rates[i] * (1 - rates[i]) for i in draw(rates))
        return skill

    levels = [random.Random(f"level {i}").uniform(-8, 8) for i in range(200)]
    learnt = {}
    for name, rules in {
        "passes": CurriculumSection(cooldown_steps=1),
        "target": CurriculumSection(target_success_rate=0.5),
    }.items():
        curriculum = stream(rules, sizes=(200,))

        def draw(rates, curriculum=curriculum):
            scores = {i: [1.0] * round(16 * rate) + [0.0] * (16 - round(16 * rate)) for i, rate in rates.items()}
            return take_step(curriculum, 16, scores.__getitem__)[0]

        learnt[name] = skill_after(150, draw)
    assert learnt["target"] > 1.25 * learnt["passes"] > 0


def test_prompts_under_way_keep_the_curriculum_that_drew_them():
    def producer(prompts):
        return Producer(
            None, prompts, Ledger(LedgerLimits(per_step=2, steps=9)), None, ProducerConfig(samples=2), Waits()
        )

    drawn = stream(CurriculumSection(target_success_rate=0.5))
    drawn.take(2)
    with_it, without = producer(drawn), producer(PromptStream(prompts_of(range(4)), seed=0))
    under_way = {"in_flight": [0, 1]}
    states = [json.loads(json.dumps(one.state()[0])) for one in (with_it, without)]
    for state in states:
        state["ledger"] |= under_way
    for one, state, words in ((without, states[0], "with it"), (with_it, states[1], "without it")):
        with pytest.raises(ConfigError, match=f"cannot begin or end at this checkpoint.*resume {words},"):
            one.restore(state, [], step=1)
    rested = producer(stream(CurriculumSection(target_success_rate=0.5)))
    rested.restore(states[1] | {"ledger": states[1]["ledger"] | {"in_flight": []}}, [], step=1)
    with_it.restore(states[0], [], step=1)
    assert with_it.state()[0]["curriculum"] == states[0]["curriculum"]


@pytest.mark.parametrize(
    ("levels", "message"),
    [
        ([1, None, 2], r"rows.jsonl row 2: .* needs a finite number, found None in the column 'level'"),
        ([1, 2, "hard"], "row 3: .* found 'hard' in the column"),
        ([math.nan, 1, 2], "row 1: .* found nan"),
        ([True, 1, 2], "row 1: .* found True"),
    ],
)
def test_a_difficulty_that_is_no_number_is_refused(levels, message):
    with pytest.raises(DataError, match=message):
        stream(RULES["difficulty"], sizes=(3,), levels=levels)
    missing = CurriculumSection(difficulty=EasyToHard(column="hardness", steps=1))
    with pytest.raises(DataError, match=r"no column 'hardness' \(columns beside the prompt: level\)"):
        stream(missing, sizes=(3,))


SOURCES = (DataSource(path="a.jsonl"), DataSource(path="b.jsonl"))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CurriculumSection(), "data.curriculum says nothing"),
        (lambda: CurriculumSection(target_success_rate=1.5), r"target_success_rate must be in \[0, 1\], got 1.5"),
        (lambda: CurriculumSection(target_success_rate=0.5, decay=1.0), r"decay must be in \[0, 1\)"),
        (lambda: CurriculumSection(target_success_rate=0.5, sharpness=0.0), "sharpness must be positive"),
        (lambda: CurriculumSection(target_success_rate=0.5, min_weight=0.0), "min_weight must be in"),
        (lambda: CurriculumSection(cooldown_steps=-1), "cooldown_steps"),
        (lambda: EasyToHard(column="level", steps=0), "difficulty.steps"),
        (lambda: EasyToHard(column="level", steps=5, start=0.0), "difficulty.start must be in"),
        (lambda: MixturePoint(step=0, weights=(0.0, 0.0)), "not all 0"),
        (lambda: CurriculumSection(mixture=(*RULES["mixture"].mixture[::-1],)), "steps must rise"),
        (
            lambda: OnlineDataSection(train=SOURCES[:1], curriculum=RULES["mixture"]),
            r"2 weight\(s\) at step 0 for 1",
        ),
        (
            lambda: OnlineDataSection(train=SOURCES, shuffle=False, curriculum=RULES["target"]),
            "shuffle=false keeps",
        ),
        (
            lambda: OnlineDataSection(
                train=(DataSource(path="a.jsonl", weight=2.0), SOURCES[1]), curriculum=RULES["mixture"]
            ),
            "stands in place of",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
