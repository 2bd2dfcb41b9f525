"""Small organic molecules as graphs, made at random by the rules of valence, with a property of each."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

ELEMENTS = {"C": 4, "N": 3, "O": 2, "F": 1}  # how many bonds an atom has
FEATURES = len(ELEMENTS) + 4
MOST_ATOMS = 12
# What an atom adds to the logarithm of the partition between octanol and water, roughly as Wildman and Crippen have it.
_SHARE = {"C": 0.35, "N": -0.9, "O": -0.7, "F": 0.35}
_MEDIAN = 1.45  # of the property


@dataclass(frozen=True)
class Molecule:
    """Heavy atoms, and bonds as (atom, atom, order)."""

    atoms: tuple[str, ...]
    bonds: tuple[tuple[int, int, int], ...]

    @cached_property
    def neighbours(self) -> list[list[int]]:
        """The atoms that have a bond with each atom."""
        found: list[list[int]] = [[] for _ in self.atoms]
        for a, b, _ in self.bonds:
            found[a].append(b)
            found[b].append(a)
        return found

    def hydrogens(self, atom: int) -> int:
        """How many hydrogens an atom has."""
        return ELEMENTS[self.atoms[atom]] - sum(order for a, b, order in self.bonds if atom in (a, b))

    @cached_property
    def features(self) -> np.ndarray:
        """Numbers for each atom: its element, neighbours, hydrogens, double bonds, and whether it is a donor."""
        rows = np.zeros([len(self.atoms), FEATURES], np.float32)
        for atom, element in enumerate(self.atoms):
            rows[atom, list(ELEMENTS).index(element)] = 1
            hydrogens = self.hydrogens(atom)
            doubles = sum(order == 2 for a, b, order in self.bonds if atom in (a, b))
            rows[atom, len(ELEMENTS) :] = (
                len(self.neighbours[atom]),
                hydrogens,
                doubles,
                element in "NO" and hydrogens > 0,
            )
        return rows

    def partition(self) -> float:
        """The property: what atoms add, which depends on their neighbours and on theirs."""
        total = 0.0
        for atom, element in enumerate(self.atoms):
            near = [self.atoms[other] for other in self.neighbours[atom]]
            second = {far for other in self.neighbours[atom] for far in self.neighbours[other]} - {atom}
            total += _SHARE[element] + 0.12 * near.count("C") - 0.15 * sum(each in "NO" for each in near)
            if element == "O" and self.hydrogens(atom) and any(self.atoms[far] in "NO" for far in second):
                total += 0.6  # a hydrogen bond within the molecule
        return total

    @cached_property
    def label(self) -> int:
        """1 where the property is above the median of made molecules."""
        return int(self.partition() > _MEDIAN)


def made(count: int, seed: int = 0) -> list[Molecule]:
    """Molecules of up to 12 heavy atoms: chains with branches, rings and double bonds."""
    random = np.random.default_rng(seed)
    return [_molecule(random) for _ in range(count)]


def _molecule(random: np.random.Generator) -> Molecule:
    size = int(random.integers(4, MOST_ATOMS + 1))
    atoms, bonds = ["C"], list[tuple[int, int, int]]()
    free = [ELEMENTS["C"]]

    def join(a: int, b: int, order: int) -> None:
        bonds.append((a, b, order))
        free[a] -= order
        free[b] -= order

    while len(atoms) < size:
        element = str(random.choice(list(ELEMENTS), p=[0.66, 0.14, 0.15, 0.05]))
        places = [atom for atom, left in enumerate(free) if left]
        if not places or (sum(free) == 1 and element == "F"):
            break
        to = int(random.choice(places))
        atoms.append(element)
        free.append(ELEMENTS[element])
        order = 2 if min(free[to], free[-1]) > 1 and random.random() < 0.2 else 1
        join(to, len(atoms) - 1, order)
    for _ in range(int(random.integers(3))):  # rings of five or more
        near = {(a, b) for a, b, _ in bonds}
        pairs = [(a, b) for b in range(len(atoms)) for a in range(b - 3) if free[a] and free[b] and (a, b) not in near]
        if pairs:
            a, b = pairs[int(random.integers(len(pairs)))]
            join(a, b, 1)
    return Molecule(tuple(atoms), tuple(bonds))
