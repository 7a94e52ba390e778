"""What a plan leaves out is never more than it may be."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import bayesattn as ba
from bayesattn.attention import plan as planning
from bayesattn.attention import plan_rows
from bayesattn.attention.inputs import make_problem
from bayesattn.attention.kernels import blockwise, reference, sdpa
from bayesattn.attention.problem import Problem, document_ranges, visible_counts
from tests.attention.cases import random_case, reference_gradients

Tried = Callable[[str, int], None]

# Blocks and bins small enough to cut something from short sequences, and plans made even if they save little.
SMALL = planning.PlanLimits(rows=8, bin=4, least_queries=1, most_kept=2.0, wide=16)
FORWARD = {
    "blockwise": partial(blockwise.forward, limits=SMALL),
    "sdpa": partial(sdpa.forward, limits=SMALL),
}


@dataclass(frozen=True)
class Setting:
    queries: int
    keys: int
    offset: int
    shape: list[tuple[float, float, float]]  # beta, scale, centre
    window: int | None
    size: float
    causal: bool
    scale: str | None
    scale_prior: bool
    documents: bool
    tolerance: float
    seed: int
    batch: int = 2
    conditioned: str | None = None

    def problem(self) -> Problem:
        problem = self.static_problem()
        if self.conditioned is None:
            return problem
        heads = problem.q.shape[1]
        parameters = torch.randn(self.batch, heads, self.queries, 3, dtype=torch.float64)
        shared: tuple[torch.Tensor, ...] = ()
        family: type[ba.ConditionedPrior] = ba.ConditionedGaussian
        if self.conditioned == "gaussian":
            parameters = parameters * torch.tensor([0.5, 0.5, 3.0]) + torch.tensor([-1.0, 1.0, 0.0])
        elif self.conditioned == "profiles":
            family, shared = ba.ProfileBank, (torch.randn(1, 3, 11, dtype=torch.float64),)
        else:  # a family without a bound
            fire = ba.Fire(heads, 10).double()
            given_prior = fire.given(torch.arange(self.queries, dtype=torch.float64) + self.offset)
            family, parameters = ba.Fire, given_prior.parameters.detach()
            shared = tuple(x.detach() for x in given_prior.shared)
        return replace(problem, parameters=parameters, shared=shared, family=family.family)

    def static_problem(self) -> Problem:
        heads = 2 * len(self.shape)
        torch.manual_seed(self.seed)
        prior: ba.Prior = ba.GeneralizedGaussian.from_shape(*zip(*self.shape * 2, strict=True))  # type: ignore[arg-type]
        if self.window is not None:
            prior = prior * ba.Window(heads, self.window)
        q = self.size * torch.randn(self.batch, heads, self.queries, 4, dtype=torch.float64)
        k = self.size * torch.randn(self.batch, len(self.shape), self.keys, 4, dtype=torch.float64)
        ids = torch.randint(0, 20, (self.batch, self.keys)).eq(0).cumsum(1)
        ids[0, : self.keys // 8] = -1
        counts = visible_counts(
            self.queries,
            self.keys,
            causal=self.causal,
            query_offset=self.offset,
            document_ids=ids if self.documents else None,
        )
        scales = {
            None: None,
            "length": ba.ScalableSoftmax(heads)(counts).double(),
            "positive": 3 * torch.rand(self.batch, heads, self.queries, dtype=torch.float64),
            "any": 2 * torch.randn(self.batch, heads, self.queries, dtype=torch.float64),
            "zero": torch.zeros(1, heads, self.queries, dtype=torch.float64),
        }
        scale = scales[self.scale]
        distance = torch.arange(self.queries + self.keys - 1) + self.offset - self.keys + 1
        table = prior(distance.double()).detach()
        if self.causal:
            table[:, distance < 0] = -torch.inf
        return Problem(
            q,
            k,
            torch.eye(self.keys, dtype=torch.float64).expand(self.batch, len(self.shape), -1, -1),
            table,
            None if scale is None else scale.detach().reshape(-1, heads, self.queries),
            document_ranges(ids)[:, self.offset : self.offset + self.queries] if self.documents else None,
            0.5,
            self.scale_prior,
            self.causal,
            self.offset,
            self.tolerance,
        )


@st.composite
def settings_of(draw: st.DrawFn) -> Setting:
    keys = draw(st.integers(1, 120))
    documents = draw(st.booleans())
    queries = draw(st.integers(1, keys if documents else 120))
    return Setting(
        queries,
        keys,
        offset=draw(st.integers(0, keys - queries) if documents else st.integers(-10, keys + 20)),
        shape=draw(
            st.lists(
                st.tuples(st.floats(-1.5, 2), st.floats(0.5, 20), st.sampled_from([0.0, 0.0, 5.0, -3.0])),
                min_size=1,
                max_size=2,
            )
        ),
        window=draw(st.sampled_from([None, None, 1, 30])),
        size=draw(st.sampled_from([0.1, 1.0, 3.0])),
        causal=draw(st.booleans()),
        scale=draw(st.sampled_from([None, "length", "positive", "any", "zero"])),
        scale_prior=draw(st.booleans()),
        documents=documents,
        tolerance=draw(st.sampled_from([0.0, 1e-6, 1e-3, 0.1, 0.5])),
        seed=draw(st.integers(0, 2**31)),
    )


def conditioned_settings() -> st.SearchStrategy[Setting]:
    """The same with priors that depend on the query."""
    families = st.sampled_from(["gaussian", "gaussian", "profiles", "profiles", "fire"])
    return st.builds(lambda setting, family: replace(setting, conditioned=family), settings_of(), families)


def dropped_mass(problem: Problem, plan: planning.Plan) -> torch.Tensor:
    """The posterior mass outside the plan, `[B, H, M]`."""
    posterior = reference.posterior(problem)
    key = torch.arange(problem.num_keys)
    block = torch.arange(problem.num_queries) // plan.rows
    outside = (key < plan.start[:, block, None]) | (key >= plan.stop[:, block, None])
    return (posterior * outside).sum(-1)


@st.composite
def long_settings(draw: st.DrawFn) -> Setting:
    """Problems as large as those that are pruned in use."""
    queries = draw(st.integers(2048, 2400))
    documents = draw(st.booleans())
    keys = queries if documents else queries + draw(st.integers(-300, 300))
    local = st.tuples(st.floats(0.4, 2.0), st.floats(0.5, 60), st.sampled_from([0.0, 0.0, 40.0]))
    retrieval = st.tuples(st.floats(-1.5, 0.0), st.floats(0.5, 20), st.just(0.0))
    return Setting(
        queries,
        keys,
        offset=keys - queries,
        shape=[draw(st.one_of(local, local, local, retrieval))],
        window=draw(st.sampled_from([None, None, 30, 500])),
        size=draw(st.sampled_from([0.1, 0.5, 1.0])),
        causal=draw(st.booleans()),
        scale=draw(st.sampled_from([None, "length", "length", "positive"])),
        scale_prior=draw(st.booleans()),
        documents=documents,
        tolerance=draw(st.sampled_from([0.0, 1e-6, 1e-3, 0.1])),
        seed=draw(st.integers(0, 2**31)),
        batch=1,
    )


def check_mass(setting: Setting, limits: planning.PlanLimits = SMALL) -> bool:
    """Whether there is a plan; what it leaves out is within the tolerance."""
    problem = setting.problem()
    plan = planning.plan(problem, limits)
    if plan is not None:
        assert dropped_mass(problem, plan).max() <= max(setting.tolerance, 1e-300)
    return plan is not None


def check_many(examples: int, settings_of_one: st.SearchStrategy[Setting], check: Callable[[Setting], bool]) -> int:
    """Run the check on so many examples; returns how many of them had a plan."""
    plans = 0

    @settings(max_examples=examples)
    @given(setting=settings_of_one)
    def run(setting: Setting) -> None:
        nonlocal plans
        plans += check(setting)

    run()
    return plans


def test_the_mass_left_out_never_exceeds_the_tolerance() -> None:
    assert check_many(250, settings_of(), check_mass) > 50


@pytest.mark.filterwarnings("ignore:Fire has no bound")
def test_the_mass_left_out_under_conditioned_priors_never_exceeds_the_tolerance() -> None:
    assert check_many(250, conditioned_settings(), check_mass) > 50


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Fire has no bound")
def test_the_mass_left_out_under_conditioned_priors_in_ten_thousand_cases(tried: Tried) -> None:
    tried("pruning problems with conditioned priors", 10_000)
    kept = check_many(10_000, conditioned_settings(), check_mass)
    tried("pruning problems with conditioned priors in which keys were left out", kept)


@pytest.mark.slow
def test_the_mass_left_out_never_exceeds_the_tolerance_in_ten_thousand_cases(tried: Tried) -> None:
    tried("pruning problems", 10_000)
    tried("pruning problems in which keys were left out", check_many(10_000, settings_of(), check_mass))


def check_at_full_size(setting: Setting) -> bool:
    """The mass, and the output of both kernels, with the limits of use."""
    pruned = check_mass(setting, planning.DEFAULT_LIMITS)
    problem = replace(setting.problem(), v=torch.randn(1, 1, setting.keys, 4, dtype=torch.float64))
    exact = reference.forward(problem).out
    for kernel in (blockwise, sdpa):
        error = (kernel.forward(problem).out - exact).norm(dim=-1).max()
        assert error <= 2 * setting.tolerance * problem.v.norm(dim=-1).max() + 1e-9
    return pruned


@pytest.mark.parametrize("tolerance", [0.0, 1e-6])
def test_a_prompt_as_long_as_those_that_are_pruned_keeps_the_bound(tolerance: float) -> None:
    local = Setting(2100, 2100, 0, [(1.0, 4.0, 0.0)], 30, 0.5, True, "length", True, False, tolerance, 0, batch=1)
    assert check_at_full_size(local)


@pytest.mark.slow
def test_prompts_as_long_as_those_that_are_pruned_keep_the_bound(tried: Tried) -> None:
    tried("pruning problems of 2,048 queries or more", 600)
    tried("pruning problems in which keys were left out", check_many(600, long_settings(), check_at_full_size))


@settings(max_examples=60)
@given(setting=settings_of())
def test_a_larger_tolerance_never_keeps_more(setting: Setting) -> None:
    plans = [
        planning.plan(replace(setting, tolerance=tolerance).problem(), SMALL)
        for tolerance in (0.0, 1e-9, 1e-6, 1e-3, 0.1, 0.9)
    ]
    for strict, loose in pairwise(plans):
        if loose is None:
            assert strict is None
        elif strict is not None:
            assert (strict.start <= loose.start).all()
            assert (strict.stop >= loose.stop).all()


@pytest.mark.parametrize("kernel", FORWARD)
@pytest.mark.filterwarnings("ignore:Fire has no bound")
@settings(max_examples=60)
@given(setting=st.one_of(settings_of(), conditioned_settings()))
def test_the_output_is_off_by_at_most_twice_the_tolerance(kernel: str, setting: Setting) -> None:
    problem = replace(setting.problem(), v=torch.randn(2, len(setting.shape), setting.keys, 4, dtype=torch.float64))
    out = FORWARD[kernel](problem).out
    error = (out - reference.forward(problem).out).norm(dim=-1).max()
    assert error <= 2 * setting.tolerance * problem.v.norm(dim=-1).max() + 1e-9


@pytest.mark.parametrize("arguments", [{}, {"documents": True}, {"causal": False, "scaled": None}], ids=str)
def test_gradients_of_what_is_kept_are_exact_when_nothing_else_matters(arguments: dict[str, Any]) -> None:
    case = random_case(70, kv_heads=2, hidden=0.1, **arguments)
    distance = torch.arange(case.table.shape[1])
    distance = distance if arguments.get("causal", True) else distance - len(distance) // 2
    case.table.sub_(3.0 * distance.abs())  # so steep that the kept range is short and the rest is nothing
    if case.query_scale is not None:
        case.query_scale.abs_().add_(0.5)
    problem = replace(case.problem(), tolerance=1e-12)
    assert planning.plan(problem, SMALL) is not None
    gradient = torch.randn_like(case.q)
    pruned = blockwise.backward(problem, gradient, None, limits=SMALL)
    for ours, expected in zip(pruned, reference_gradients(problem, gradient), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize(
    ("module", "planner"), [(blockwise, "plan"), (sdpa, "plan_each_head")], ids=["blockwise", "sdpa"]
)
def test_a_forward_pass_makes_one_plan(
    monkeypatch: pytest.MonkeyPatch, module: Any, planner: str, kv_heads: int
) -> None:
    problems = []
    make = getattr(module, planner)
    monkeypatch.setattr(module, planner, lambda problem, limits: problems.append(problem) or make(problem, limits))
    problem = random_case(40, heads=4, kv_heads=kv_heads, tolerance=1e-3).problem()
    module.forward(problem, limits=SMALL)
    assert problems == [problem]


@settings(max_examples=30)
@given(setting=settings_of())
def test_heads_of_a_plan_are_planned_as_if_alone(setting: Setting) -> None:
    problem = setting.problem()
    everything = planning.plan_each_head(problem, SMALL)
    heads = slice(1, None, problem.group)
    scale = None if problem.query_scale is None else problem.query_scale[:, heads]
    alone = replace(problem, q=problem.q[:, heads], log_prior=problem.log_prior[heads], query_scale=scale)
    by_itself = planning.plan_each_head(alone, SMALL)
    if everything is not None and by_itself is not None:
        assert torch.equal(everything.of_heads(heads).start, by_itself.start)
        assert torch.equal(everything.of_heads(heads).stop, by_itself.stop)


def test_local_heads_become_windows_and_retrieval_heads_lose_only_the_near() -> None:
    prior = ba.GeneralizedGaussian.from_shape([1.0, -1.0], [2.0, 4.0])
    q = torch.randn(1, 2, 400, 8)
    table = torch.nn.functional.pad(prior(torch.arange(400)).detach(), (399, 0), value=-torch.inf)
    problem = Problem(q, q, q, table, None, None, 8**-0.5, True, True, 0, 1e-6)
    plan = planning.plan(problem, SMALL)
    assert plan is not None
    local, retrieval = plan.kept().tolist()
    assert local < 0.4
    assert 0.9 < retrieval <= 1
    assert (plan.start[1] == 0).all()
    assert "all  60.96%" in str(plan)


def test_a_plan_that_saves_nothing_is_not_made() -> None:
    q = torch.randn(1, 2, 100, 8)
    problem = Problem(q, q, q, torch.zeros(2, 199), None, None, 1.0, True, True, 0, 1e-6)
    assert planning.plan(problem, replace(SMALL, most_kept=0.9)) is None


def test_the_plan_of_no_sequences_is_empty() -> None:
    q = torch.zeros(0, 1, 17, 4)
    assert ba.attention_plan(q, q, q, document_ids=torch.zeros(0, 17, dtype=torch.long)).flops().sum() == 0


def test_a_conditioned_prior_prunes_where_its_queries_look_nearby() -> None:
    n = 512
    torch.manual_seed(0)
    q, k = 0.3 * torch.randn(2, 1, 2, n, 4)
    local = torch.tensor([-1.0, 1.0, 0.0]).expand(1, 2, n, 3)  # log p = −0.37·d
    far = torch.tensor([-5.0, 0.1, 0.0]).expand(1, 2, n, 3)
    for parameters, most in ((local, 0.3), (far, 1.0)):
        prior = ba.GivenPrior(ba.ConditionedGaussian, 2, parameters)
        made = planning.plan(make_problem(q, k, k, prior, tolerance=1e-6), SMALL)
        assert made is not None
        assert made.kept().max() <= most
        assert (made.kept().min() == 1.0) == (most == 1.0)


def test_profiles_times_a_window_keep_the_window() -> None:
    n = 300
    prior = ba.ProfileBank(2, 3, extent=10) * ba.Window(2, 20)
    q = torch.randn(1, 2, n, 4)
    made = planning.plan(make_problem(q, q, q, prior.given(torch.randn(1, n, 3))), SMALL)
    assert made is not None
    assert (made.stop - made.start).max() <= 20 + SMALL.rows + 8 * SMALL.bin


def test_a_family_without_a_bound_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_rows, "_warned", set())
    problem = Setting(20, 20, 0, [(1.0, 2.0, 0.0)], None, 1.0, True, None, True, False, 0.1, 0, conditioned="fire")
    with pytest.warns(UserWarning, match="Fire has no bound of its rows, so only keys that a static factor hides"):
        planning.plan(problem.problem(), SMALL)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        planning.plan(problem.problem(), SMALL)


@pytest.mark.parametrize("family", [ba.ConditionedGaussian, ba.ProfileBank])
@given(seed=st.integers(0, 10_000), width=st.integers(1, 9))
@settings(max_examples=100)
def test_the_bound_of_a_family_is_never_exceeded(family: type[ba.ConditionedPrior], seed: int, width: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    parameters = torch.randn(2, 3, 4, 3, dtype=torch.float64, generator=generator) * torch.tensor([1.0, 1.0, 8.0])
    shared = (torch.randn(1, 3, 11, dtype=torch.float64, generator=generator),) if family is ba.ProfileBank else ()
    distances = torch.arange(-3 * width, 8 * width, dtype=torch.float64)
    columns = distances.expand(4, -1) if family.elementwise else distances
    rows = family.rows(parameters, shared, columns).unflatten(-1, (-1, width))
    bound = family.highest(parameters, shared, distances.unflatten(0, (-1, width)))
    assert bound is not None
    assert (rows.amax(-1) <= bound + 1e-12).all()
