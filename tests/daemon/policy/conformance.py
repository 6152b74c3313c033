"""The conformance suite that every replacement policy has to pass."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from tensord.daemon.policy.candidate import Candidate
from tensord.daemon.policy.replacement import Replacement, Turn

AGENTS = ("", "one", "two")
TURNS: tuple[Turn, ...] = ("began", "tool_call", "turn_ended", "finished")


class AnyPolicy(RuleBasedStateMachine):
    """The conformance suite: a policy is an order over exactly the spans that may go.

    Each insertion makes a new span id; the key says whether the entry was there before.
    """

    def __init__(self, policy: Replacement) -> None:
        super().__init__()
        self.policy = policy
        self.known: dict[int, int] = {}
        self.may_go: set[int] = set()
        self.used_at: dict[int, int] = {}
        self.put_lately: set[int] = set()
        self.new: dict[int, Candidate] = {}
        self.clock = 0
        self.now = 0.0

    def use(self, span: int) -> None:
        self.clock += 1
        self.used_at[span] = self.clock

    @rule(by=st.sampled_from([0.0, 0.01, 1.0, 100.0]))
    def time_passes(self, by: float) -> None:
        self.now += by

    @rule(
        key=st.integers(1, 20),
        size=st.sampled_from([64, 4096]),
        tokens=st.sampled_from([0, 16]),
        depth=st.sampled_from([0, 1, 20]),
        owner=st.sampled_from([1, 2]),
        agent=st.sampled_from(AGENTS),
        data=st.data(),
    )
    def insert(self, key: int, size: int, tokens: int, depth: int, owner: int, agent: str, data: st.DataObject) -> None:
        span = self.clock + 1
        new = Candidate(span, bytes(31) + bytes([key]), size, tokens, 0.0, depth, depth * size, agent, owner)
        if depth and len(self.known) > 1:
            self.policy.admits(new, data.draw(st.sampled_from(sorted(self.known))))
        self.policy.inserted(new, self.now)
        self.new[span] = new
        self.known[span] = owner
        self.may_go.add(span)
        self.use(span)
        self.put_lately.add(span)

    @rule()
    def drained(self) -> None:
        self.policy.drained(reads=True)
        for span in sorted(self.put_lately & self.known.keys(), key=self.used_at.__getitem__):
            self.use(span)
        self.put_lately.clear()

    @precondition(lambda self: self.known)
    @rule(data=st.data(), agent=st.sampled_from(AGENTS))
    def access(self, data: st.DataObject, agent: str) -> None:
        span = data.draw(st.sampled_from(sorted(self.known)))
        self.policy.accessed(span, self.now, agent)
        self.use(span)

    @rule(agent=st.sampled_from(("one", "two", "unheard of")), state=st.sampled_from(TURNS))
    def turn(self, agent: str, state: Turn) -> None:
        self.policy.turn(agent, state, self.now)

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def change_whether_it_may_go(self, data: st.DataObject) -> None:
        span = data.draw(st.sampled_from(sorted(self.known)))
        self.may_go ^= {span}
        self.policy.may_go(span, span in self.may_go)

    @precondition(lambda self: self.known)
    @rule(data=st.data(), evicted=st.booleans())
    def remove(self, data: st.DataObject, evicted: bool) -> None:
        span = data.draw(st.sampled_from(sorted(self.known)))
        self.policy.removed(span, evicted=evicted)
        del self.known[span]
        self.may_go.discard(span)

    @invariant()
    def every_span_that_may_go_comes_once_from_cold_to_warm(self) -> None:
        assert len(self.policy) == len(self.known)
        for owners in (None, {1}, {1, 2}):
            order = list(self.policy.coldest(owners))
            assert len(order) == len(set(order))
            assert set(order) == {span for span in self.may_go if owners is None or self.known[span] in owners}
            ranks = [self.policy.rank(span) for span in order]
            assert ranks == sorted(ranks)
        every = [self.policy.rank(span) for span in self.known]
        assert len(set(every)) == len(every)
        self.policy.check_invariants()

    @invariant()
    def outside_the_window_the_one_worth_less_goes_first(self) -> None:
        told = {span: self.policy.explain(span) for span in self.policy.coldest()}
        worths = [each.worth for each in told.values() if not each.in_window]
        assert worths == sorted(worths)
        order = [each.in_window for each in told.values()]
        assert order == sorted(order), "something of the window goes before what is outside it"

    @invariant()
    def what_it_tells_of_a_span_is_what_it_goes_by(self) -> None:
        told = {span: self.policy.explain(span) for span in self.known}
        assert all(each.worth == self.policy.worth(span) for span, each in told.items())
        window = sum(self.new[span].size_bytes for span, each in told.items() if each.in_window)
        assert window == (self.policy.window_bytes or 0)


def check(machine: Callable[[], AnyPolicy]) -> None:
    """Runs a suite, which is AnyPolicy or derived from it, on new policies."""
    effort = settings(max_examples=50, stateful_step_count=40, deadline=None)
    run_state_machine_as_test(machine, settings=effort)  # type: ignore[arg-type]  # it takes any callable


def filled(policy: Replacement, spans: range) -> Replacement:
    """The policy, after it was told of these spans in order."""
    for span in spans:
        policy.inserted(Candidate(span, bytes(32), 64, 1), 0.0)
    return policy
