"""The least cost of choices, and choices that cost nearly as little: message passing on the graph of a problem.

The linear program over all layouts and moves has a dual, in which costs are moved between nodes and edges without
changing the cost of any choice, so as to raise the least cost of each node and each edge. The sum of these minima is a
bound, and no pass lowers it. Nodes are visited in the order of the program and back: each collects the costs of its
edges to earlier nodes, and gives them to its edges to later ones (sequential reweighted message passing, Kolmogorov
2015). No matrix is needed, and passes start from what the passes before them have found, at other prices, too.
"""

from collections.abc import Sequence
from typing import final

import attrs
import numpy as np

from shardrules.core.deadline import Deadline
from shardrules.programs.autoplan.graph.home import project
from shardrules.programs.autoplan.graph.problem import Problem
from shardrules.programs.autoplan.solve.formulation import MemoryConstraint


@final
@attrs.define(eq=False)
class _End:
    """A node at one end of a link. Several of its layouts may be one code: the same layout of an array."""

    node: int
    codes: np.ndarray
    """For each layout its code."""
    order: np.ndarray
    """The layouts, sorted by their code."""
    firsts: np.ndarray
    """For each code its first position in `order`."""
    costs: np.ndarray
    """The costs that were moved here from the layouts, by code; costs that were moved to them are negative."""

    @classmethod
    def of(cls, node: int, codes: np.ndarray, count: int) -> "_End":
        order = np.argsort(codes, kind="stable")
        return cls(node, codes, order, np.searchsorted(codes[order], np.arange(count)), np.zeros(count))


@final
@attrs.define(eq=False)
class _Link:
    """The cost of two nodes together, over their codes."""

    ends: tuple[_End, _End]
    cost: np.ndarray
    """From each code of the first end to each of the last."""
    priced: np.ndarray
    """The costs of pairs, with their copies."""
    memory_cost: np.ndarray | None = None
    """The costs of copies at the prices of memory."""

    @classmethod
    def of(cls, start: int, start_codes: np.ndarray, end: int, end_codes: np.ndarray, cost: np.ndarray) -> "_Link":
        """Returns a link to which nothing was moved."""
        rows, columns = cost.shape
        return cls((_End.of(start, start_codes, rows), _End.of(end, end_codes, columns)), cost, cost)

    def side(self, node: int) -> int:
        """The index of the end at a node."""
        return 0 if self.ends[0].node == node else 1

    def joint(self) -> np.ndarray:
        """The present cost of each pair."""
        start, end = self.ends
        cost = self.priced + start.costs[:, None]
        cost += end.costs
        return cost

    def least(self, side: int) -> np.ndarray:
        """The least cost of each code of an end now."""
        return np.minimum.reduce(self.joint(), 1 - side)  # a third faster than `.min(axis)`, for arrays this small

    def beside(self, side: int, code: int) -> np.ndarray:
        """The cost of each code of an end beside one of the other."""
        start, end = self.ends
        if side == 0:
            return self.priced[:, code] + start.costs + end.costs[code]
        return self.priced[code] + start.costs[code] + end.costs

    def set_costs(self, cost: np.ndarray, memory_cost: np.ndarray | None) -> None:
        """Changes what pairs cost, and what their copies cost at the prices of memory."""
        self.cost, self.memory_cost = cost, memory_cost
        self.priced = cost if memory_cost is None else cost + memory_cost


@final
@attrs.frozen(eq=False)
class _Bundle:
    """Links that bring an array to the same region: what goes to the same layout is paid once."""

    links: tuple[_Link, ...]
    targets: tuple[np.ndarray, ...]
    """For each link the index of the layout that each of its columns is."""
    cost: np.ndarray
    """From each layout to each target: what the links pay together."""
    shares: np.ndarray
    """The number of links that have each target."""


@final
@attrs.frozen(eq=False)
class MessageState:
    """The places that costs have been moved to."""

    unary: tuple[np.ndarray, ...]
    memory_unary: tuple[np.ndarray, ...]
    links: tuple[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None], ...]


@final
class Messages:
    """The state of message passing on a problem. `preference` is what layouts cost beyond their time, in seconds."""

    def __init__(self, problem: Problem, preference: Sequence[np.ndarray]) -> None:
        self.problem = problem
        # What is impossible costs more than any choice, and little enough that small costs added to it are not lost.
        self.impossible = 100.0 * problem.highest_cost() + 1e-6
        self.unary = [
            np.asarray(node.seconds, float) + extra for node, extra in zip(problem.nodes, preference, strict=True)
        ]
        self.slack = float(sum(np.max(extra, initial=0.0) for extra in preference))
        self.links: list[_Link] = []
        self.bundles: list[_Bundle] = []
        self.edge_links: dict[int, _Link] = {}
        self.memory_unary = [np.zeros(len(unary)) for unary in self.unary]
        for group, count in problem.edge_groups:
            self._add_group(group, count)
        for first, second in problem.equal_homes:
            self._add_equality(
                first.node,
                project(problem.nodes[first.node].layouts, first),
                second.node,
                project(problem.nodes[second.node].layouts, second),
            )
        self.earlier: list[list[_Link]] = [[] for _ in problem.nodes]
        self.later: list[list[_Link]] = [[] for _ in problem.nodes]
        for link in self.links:
            first, last = sorted(end.node for end in link.ends)
            self.later[first].append(link)
            self.earlier[last].append(link)

    def _add_group(self, group: Sequence[int], count: int) -> None:
        members: list[int] = []
        for edge_index in group:
            edge = self.problem.edges[edge_index]
            cost = np.minimum(edge.seconds * count, self.impossible)
            if len(group) == 1 and 1 in cost.shape and edge.start != edge.end:
                node, costs = edge.decided(cost)
                self.unary[node] = self.unary[node] + costs
            elif edge.start != edge.end:
                link = _Link.of(edge.start, edge.from_codes, edge.end, edge.to_codes, cost)
                self.links.append(link)
                self.edge_links[edge_index] = link
                members.append(edge_index)
            elif len(group) == 1:
                self.unary[edge.start] = self.unary[edge.start] + cost[edge.from_codes, edge.to_codes]
        if len(members) > 1:
            self._add_bundle(members)

    def _add_bundle(self, members: Sequence[int]) -> None:
        """Lets links share what they cost. Each pays a part at first."""
        edges, links = [self.problem.edges[index] for index in members], [self.edge_links[index] for index in members]
        rows = np.concatenate([edge.to_layouts for edge in edges])
        distinct, codes = np.unique(rows, axis=0, return_inverse=True)
        targets = np.split(codes.ravel(), np.cumsum([len(edge.to_layouts) for edge in edges])[:-1])
        cost, shares = np.zeros((len(links[0].cost), len(distinct))), np.zeros(len(distinct))
        for link, columns in zip(links, targets, strict=True):
            paid = np.where(link.cost < self.impossible, link.cost, 0.0)
            cost[:, columns] = np.maximum(cost[:, columns], paid)
            shares[columns] += 1
        for link, columns in zip(links, targets, strict=True):
            part = cost[:, columns] / shares[columns]
            link.set_costs(np.where(link.cost < self.impossible, part, self.impossible), link.memory_cost)
        self.bundles.append(_Bundle(tuple(links), tuple(targets), cost, shares))

    def _add_equality(self, start: int, start_rows: np.ndarray, end: int, end_rows: np.ndarray) -> None:
        distinct, codes = np.unique(np.concatenate([start_rows, end_rows]), axis=0, return_inverse=True)
        codes, cut = codes.ravel(), len(start_rows)
        cost = np.where(np.eye(len(distinct), dtype=bool), 0.0, self.impossible)
        # Layouts that only one side has are codes without a layout on the other: they get a row that is never met.
        sides = []
        for side in (codes[:cut], codes[cut:]):
            present, local = np.unique(side, return_inverse=True)
            sides.append((present, local.ravel()))
        (rows, start_codes), (columns, end_codes) = sides
        cost = cost[np.ix_(rows, columns)]
        if len(rows) == 1:
            self.unary[end] = self.unary[end] + cost[0][end_codes]
        elif len(columns) == 1:
            self.unary[start] = self.unary[start] + cost[:, 0][start_codes]
        else:
            self.links.append(_Link.of(start, start_codes, end, end_codes, cost))

    def charge(self, constraints: Sequence[MemoryConstraint], prices: Sequence[float]) -> float:
        """Sets the prices of a byte at some moments, in seconds; returns what a choice that fits pays at most."""
        unary = [np.zeros(len(costs)) for costs in self.unary]
        copies: dict[int, np.ndarray] = {}
        paid = 0.0
        for constraint, price in zip(constraints, prices, strict=True):
            paid += price * (constraint.limit_bytes - constraint.constant_bytes)
            if not price:
                continue
            for node, sizes in constraint.layout_bytes.items():
                unary[node] += sizes * price
            for edge_index, sizes in constraint.copy_bytes.items():
                copies[edge_index] = copies.get(edge_index, 0.0) + sizes * price
        # Edges with an end of one layout have no link: their copies are paid by the other end.
        for edge_index, sizes in copies.items():
            edge = self.problem.edges[edge_index]
            if edge_index not in self.edge_links and edge.start != edge.end:
                node, costs = edge.decided(sizes)
                unary[node] += costs
        # Only differences to the old prices are added: messages that were passed at those stay valid.
        for node, costs in enumerate(unary):
            self.unary[node] = self.unary[node] + (costs - self.memory_unary[node])
        self.memory_unary = unary
        for edge_index, link in self.edge_links.items():
            link.set_costs(link.cost, copies.get(edge_index))
        return paid

    def sweep(self) -> None:
        """Visits all nodes in order, and back."""
        for node in range(len(self.unary)):
            self._visit(node, self.earlier[node], self.later[node])
        for node in range(len(self.unary) - 1, -1, -1):
            self._visit(node, self.later[node], self.earlier[node])
        for bundle in self.bundles:
            self._share(bundle)

    def _visit(self, node: int, before: Sequence[_Link], after: Sequence[_Link]) -> None:
        """Collects what links to the nodes before cost at least, and gives it to the links to the nodes after."""
        unary = self.unary[node]
        for link in before:
            side = link.side(node)
            end, least = link.ends[side], link.least(side)
            end.costs = end.costs - least
            unary = unary + least[end.codes]
        part = unary / max(len(before), len(after), 1)
        for link in after:
            end = link.ends[link.side(node)]
            moved = np.minimum.reduceat(part[end.order], end.firsts)
            end.costs = end.costs + moved
            unary = unary - moved[end.codes]
        self.unary[node] = unary

    def _share(self, bundle: _Bundle) -> None:
        """Lets each link of a bundle pay only what its bound needs, and gives the rest to the others."""
        needs: list[np.ndarray] = []
        left = bundle.cost.copy()
        for link, columns in zip(bundle.links, bundle.targets, strict=True):
            joint = link.joint()
            is_possible = link.cost < self.impossible
            need = np.where(is_possible, link.cost - np.minimum(joint - joint.min(), link.cost), 0.0)
            needs.append(need)
            left[:, columns] -= need
        left = np.maximum(left, 0.0) / bundle.shares
        for link, columns, need in zip(bundle.links, bundle.targets, needs, strict=True):
            cost = np.where(link.cost < self.impossible, need + left[:, columns], self.impossible)
            link.set_costs(cost, link.memory_cost)

    def bound(self) -> float:
        """The least cost of every choice now, prices of memory included."""
        total = sum(float(unary.min()) for unary in self.unary)
        return total + sum(float(link.joint().min()) for link in self.links) - self.slack

    def extra(self) -> tuple[np.ndarray, ...]:
        """For each node and layout how much above `bound()` every choice is that takes it."""
        beliefs = [unary - unary.min() for unary in self.unary]
        for link in self.links:
            joint = link.joint()
            joint = joint - joint.min()
            for side, end in enumerate(link.ends):
                beliefs[end.node] = beliefs[end.node] + joint.min(axis=1 - side)[end.codes]
        return tuple(beliefs)

    def settle(self, sweeps: int, deadline: Deadline) -> float:
        """Sweeps so many times, as far as the time goes; returns the bound, prices of memory included."""
        for _ in range(sweeps):
            if deadline.is_over:
                break
            self.sweep()
        return self.bound()

    def decoded(self) -> tuple[int, ...]:
        """A choice that costs about as little as the bound: node by node, each the best beside those before it."""
        return self._decoded()[0]

    def narrowed(self, steps: int, deadline: Deadline) -> tuple[int, ...]:
        """A choice found by fixing nodes in steps, the clearest first, with sweeps in between. None stays fixed."""
        state = self.state()
        is_open = np.ones(len(self.unary), bool)
        for step in range(steps, 1, -1):
            choice, margins = self._decoded()
            order = np.argsort(np.where(is_open, -margins, np.inf), kind="stable")
            for node in order[: int(is_open.sum()) // step].tolist():
                is_open[node] = False
                self.unary[node] = self.unary[node] + np.where(
                    np.arange(len(self.unary[node])) == choice[node], 0.0, self.impossible
                )
            self.settle(2, deadline)  # chosen by hand
            if deadline.is_over:
                break
        choice, _ = self._decoded()
        self.restore(state)
        return choice

    def state(self) -> MessageState:
        """The places that costs have been moved to so far, to go back to."""
        # Nothing is changed in place, so the arrays themselves are the state.
        links = tuple((link.cost, link.ends[0].costs, link.ends[1].costs, link.memory_cost) for link in self.links)
        return MessageState(tuple(self.unary), tuple(self.memory_unary), links)

    def restore(self, state: MessageState) -> None:
        """Goes back to a state, with the prices that were in force then."""
        self.unary, self.memory_unary = list(state.unary), list(state.memory_unary)
        for link, (cost, start_costs, end_costs, memory_cost) in zip(self.links, state.links, strict=True):
            link.ends[0].costs, link.ends[1].costs = start_costs, end_costs
            link.set_costs(cost, memory_cost)

    def _decoded(self) -> tuple[tuple[int, ...], np.ndarray]:
        """A choice, and by how much the layout of each node is cheaper than the next best."""
        choice = [-1] * len(self.unary)
        margins = np.zeros(len(choice))
        for node, unary in enumerate(self.unary):
            costs = unary
            for link in self.later[node]:
                side = link.side(node)
                costs = costs + link.least(side)[link.ends[side].codes]
            for link in self.earlier[node]:
                side = link.side(node)
                other = link.ends[1 - side]
                costs = costs + link.beside(side, other.codes[choice[other.node]])[link.ends[side].codes]
            choice[node] = int(np.argmin(costs))
            margins[node] = np.partition(costs, 1)[1] - costs[choice[node]] if len(costs) > 1 else np.inf
        return tuple(choice), margins
