"""The running sums of a session say what a look at all of its calls would."""

from hypothesis import given
from hypothesis import strategies as st

from capture_proxy.graph import Facts, count_agent_calls
from capture_proxy.ledger import Attempt, Attempts, Spent

FACTS = st.builds(Facts, st.booleans(), st.sampled_from(["", "m"]), st.sampled_from([None, 1, 2]))


@given(st.lists(FACTS), st.data())
def test_the_budget_counts_as_the_graph_does(calls: list[Facts], data: st.DataObject) -> None:
    spent = Spent()
    for facts in calls:
        spent.add(facts)
    gone = data.draw(st.lists(st.sampled_from(range(len(calls))), unique=True)) if calls else []
    for i in gone:
        spent.add(calls[i], -1)
    left = [facts for i, facts in enumerate(calls) if i not in gone]
    assert spent.agent_calls == count_agent_calls(left)
    extra = data.draw(FACTS)
    assert spent.with_one_more(extra) == count_agent_calls([*left, extra])


def test_what_is_remembered_of_equal_bodies_stays_small() -> None:
    attempts = Attempts()
    for k in range(1000):
        attempts.add(b"body", Attempt(str(k), "d", "m", acknowledged=True))
    assert len(attempts._by_body[b"body"]) == 1
    found = attempts.find(b"body", "d", "m", says_retry=True)
    assert found is not None and found.turn_id == "999"
    assert attempts.find(b"body", "d", "other", says_retry=True) is None
    assert attempts.find(b"", "d", "m", says_retry=True) is None
