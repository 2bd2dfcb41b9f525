"""Runs: as few sets as can be, acyclic together; and the graph with sets of nodes as one."""

from __future__ import annotations

from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from graph_passes.analysis.dependences import Dependences, Role, connected, runs, settled
from graph_passes.passes.fuse.partition.quotient_graph import Passage, QuotientGraph
from tests.tiers import examples


@st.composite
def nets(draw, most=9):
    count = draw(st.integers(1, most))
    before = [sorted(draw(st.sets(st.integers(0, n - 1), max_size=3))) if n else [] for n in range(count)]
    return Dependences(tuple(map(tuple, before)))


def sets_of(ranks, places=None):
    found = {}
    for number, rank in enumerate(ranks):
        if rank % 2:
            found.setdefault((rank, places[number] if places else 0), []).append(number)
    return list(found.values())


def acyclic(net, sets):
    return QuotientGraph(net, sets).order() is not None


def fewest(net, work):
    """By trying all ways to number the nodes of work."""
    for count in range(1, len(work) + 1):
        for choice in product(range(count), repeat=len(work)):
            sets = [[n for n, of in zip(work, choice, strict=True) if of == one] for one in range(count)]
            if all(sets) and acyclic(net, sets):
                return count
    return 0


@settings(max_examples=examples(150))
@given(nets(most=7), st.data())
def test_no_fewer_sets_hold_all_work(net, data):
    roles = data.draw(
        st.lists(st.sampled_from([Role.WORK, Role.WORK, Role.BORDER]), min_size=len(net), max_size=len(net))
    )
    sets = sets_of(runs(net, roles))
    work = [number for number, role in enumerate(roles) if role is Role.WORK]
    assert sorted(number for one in sets for number in one) == work
    assert acyclic(net, sets)
    assert len(sets) == fewest(net, work)


@settings(max_examples=examples(300))
@given(nets(), st.data())
def test_sets_of_any_roles_and_places_are_acyclic_together_before_and_after_nodes_wait(net, data):
    count = len(net)
    roles = data.draw(st.lists(st.sampled_from(list(Role)), min_size=count, max_size=count))
    places = data.draw(st.lists(st.integers(0, 1), min_size=count, max_size=count))
    edges = [(p, n) for n in range(count) for p in net.before[n]]
    apart = frozenset(data.draw(st.sets(st.sampled_from(edges)))) if edges else frozenset()
    ranks = runs(net, roles, places, apart)
    later = settled(net, ranks, roles, lambda *_: True, places, apart)
    for found in (ranks, later):
        sets = sets_of(found, places)
        assert acyclic(net, sets)
        for number, role in enumerate(roles):
            assert role is Role.FREE or (found[number] % 2 == 1) == (role is not Role.BORDER)
            same = [p for p in net.before[number] if any({p, number} <= set(one) for one in sets)]
            assert not any((p, number) in apart or roles[p] is Role.LAST for p in same)
            assert not (same and role is Role.FIRST)
    assert all(new >= old for old, new in zip(ranks, later, strict=True))
    assert all(found[p] <= found[n] for found in (ranks, later) for p, n in edges)


def test_a_border_has_a_rank_between_those_of_the_sets_beside_it():
    net = Dependences(((), (0,), (1,), (2,), (3,), (4,)))
    assert runs(net, [Role.WORK, Role.BORDER] * 3) == [1, 2, 3, 4, 5, 6]


def test_borders_side_by_side_divide_once():
    # 0 work -> 1 border -> 2 border -> 3 work, and 4 work behind border 1: it may run with 3
    net = Dependences(((), (0,), (1,), (2,), (1,)))
    W, B = Role.WORK, Role.BORDER  # noqa: N806
    assert sets_of(runs(net, [W, B, B, W, W])) == [[0], [3, 4]]


def test_a_node_waits_for_the_set_that_reads_it():
    # 0 work -> 1 border -> 3 work; 2 work is read by 3 alone
    net = Dependences(((), (0,), (), (1, 2)))
    roles = [Role.WORK, Role.BORDER, Role.WORK, Role.WORK]
    ranks = runs(net, roles)
    assert sets_of(ranks) == [[0, 2], [3]]
    assert sets_of(settled(net, ranks, roles, lambda number, *_: number == 2)) == [[0], [2, 3]]
    assert sets_of(settled(net, ranks, roles, lambda *_: False)) == [[0, 2], [3]]


def test_a_node_waits_for_a_reader_with_a_rank_larger_than_the_number_of_nodes():
    # 1 to 5 are a chain in which nothing may read a node of the same set; the last one alone reads 0
    net = Dependences(((), (), (1,), (2,), (3,), (0, 4)))
    roles = [Role.WORK, *[Role.LAST] * 5]
    ranks = runs(net, roles)
    assert ranks == [1, 1, 3, 5, 7, 9]
    assert settled(net, ranks, roles, lambda *_: True) == [9, 1, 3, 5, 7, 9]


def test_a_free_node_comes_before_a_reader_in_another_place():
    # 1, in the other place, reads the free node 0, and so does 4, behind a border
    net = Dependences(((), (0,), (), (2,), (0, 3)))
    roles = [Role.FREE, Role.WORK, Role.WORK, Role.BORDER, Role.WORK]
    places = [0, 1, 0, 0, 0]
    ranks = runs(net, roles, places)
    assert ranks == [0, 1, 1, 2, 3]
    assert settled(net, ranks, roles, lambda *_: True, places) == ranks


def test_connected_parts():
    net = Dependences(((), (), (0,), (1,), (2,)))
    assert connected(net, [0, 1, 2, 3, 4]) == [[0, 2, 4], [1, 3]]
    assert connected(net, [0, 1, 3, 4]) == [[0], [1, 3], [4]]


def test_the_papers_cycle():
    """Figure 3: A -> B -> C; A and C as one node wait for B, which waits for them."""
    net = Dependences(((), (0,), (1,)))
    contraction = QuotientGraph(net, [[0, 2]])
    assert contraction.order() is None
    assert contraction.cycles() == [[Passage(group=0, enters=2, leaves=0)]]


def test_cycles_name_the_sets_on_them():
    # {0, 5} -> {1, 4} by 0 -> 1 and back by 4 -> 5; {2, 3} lies between the two by 1 -> 3 and 2 -> 5
    net = Dependences(((), (0,), (), (1,), (), (2, 4)))
    contraction = QuotientGraph(net, [[0, 5], [1, 4], [2, 3]])
    assert contraction.order() is None
    both = [Passage(0, enters=5, leaves=0), Passage(1, enters=1, leaves=4)]
    all_three = [Passage(0, enters=5, leaves=0), Passage(1, enters=1, leaves=1), Passage(2, enters=3, leaves=2)]
    assert contraction.cycles() == [both, all_three]


def test_of_sets_that_can_come_next_the_one_with_the_smallest_last_node_does():
    contraction = QuotientGraph(Dependences(((), (), (), ())), [[0, 3], [1, 2]])
    assert contraction.order() == [1, 0]


def test_hundreds_of_nodes_have_an_order():
    net = Dependences(((), *((number,) for number in range(299))))
    assert QuotientGraph(net, []).order() == list(range(300))


@settings(max_examples=examples(200))
@given(nets(), st.data())
def test_there_is_an_order_or_a_cycle(net, data):
    owner = data.draw(st.lists(st.integers(0, 3), min_size=len(net), max_size=len(net)))
    sets = [[n for n, of in enumerate(owner) if of == one] for one in range(3)]
    sets = [one for one in sets if one]
    contraction = QuotientGraph(net, sets)
    order, cycles = contraction.order(), contraction.cycles()
    assert (order is None) == bool(cycles)
    if order is not None:
        place = {number: i for i, group in enumerate(order) for number in contraction.groups[group]}
        assert sorted(place) == list(range(len(net)))
        assert all(place[p] <= place[n] for n in range(len(net)) for p in net.before[n])
    for cycle in cycles:  # as one node each, these sets alone close a cycle
        assert not acyclic(net, [sets[one] for one, _, _ in cycle])
        if len(cycle) > 1:  # and so do the nodes by which it passes
            assert not acyclic(net, [sorted({enters, leaves}) for _, enters, leaves in cycle])
