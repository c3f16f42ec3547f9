"""Attention of a device to the keys of another, in one or two blocks, and its gradients."""

import functools
from collections.abc import Sequence
from typing import Any, final

import attrs
import jax
import jax.numpy as jnp

from shardrules.programs.attention.blocks import BlockGradients, Keys, Queries, Rows, attend, block_gradients, merge
from shardrules.programs.attention.kernels import Kernel
from shardrules.programs.attention.zigzag import Pairing, parts_of, put, take


@final
@attrs.frozen
class Rounds:
    """Attention of devices to the keys of each other."""

    how: str
    kernel: Kernel
    axis_name: tuple[str, ...]
    is_causal: bool
    is_zigzag: bool

    def index_and_size(self) -> tuple[Any, int]:
        return jax.lax.axis_index(self.axis_name), jax.lax.axis_size(self.axis_name)

    def of_own(self, queries: Queries, keys: Keys) -> Rows:
        """Attention of queries to the keys of the same device."""
        return attend(self.kernel, queries, keys, is_causal=self.is_causal, how=self.how)

    def of(self, queries: Queries, keys: Keys, index: Any, source: Any, rows: Rows) -> Rows:
        """Attention also to the keys of device `source`, for the queries of device `index`."""
        for part in self._parts(index, source):
            block = attend(
                self.kernel, take(queries, part.queries), take(keys, part.keys), is_causal=False, how=self.how
            )
            if part.is_attended is not None:
                # The block is computed all the same, and merged without weight: all devices run one program.
                block = jax.tree.map(functools.partial(jnp.where, part.is_attended), block, Rows(0.0, -jnp.inf))
            whole = Rows(put(block.out, part.queries, 0), put(block.log_sum_exp, part.queries, -jnp.inf))
            rows = merge(rows, whole)
        return rows

    def own_gradients(self, queries: Queries, keys: Keys, rows: Rows, cotangent: Any) -> BlockGradients:
        return block_gradients(self.kernel, queries, keys, rows, cotangent, is_causal=self.is_causal, how=self.how)

    def gradients(
        self, queries: Queries, keys: Keys, index: Any, source: Any, rows: Rows, cotangent: Any
    ) -> BlockGradients:
        """The gradients by way of the keys of device `source`."""
        total = None
        for part in self._parts(index, source):
            some_rows, some_cotangent = take((rows, cotangent), part.queries)
            if part.is_attended is not None:
                # Beside rows of infinite weight, a block has none.
                weights = jnp.where(part.is_attended, some_rows.log_sum_exp, jnp.inf)
                some_rows = some_rows._replace(log_sum_exp=weights)
            block = block_gradients(
                self.kernel,
                take(queries, part.queries),
                take(keys, part.keys),
                some_rows,
                some_cotangent,
                is_causal=False,
                how=self.how,
            )
            whole = BlockGradients(
                put(block.q, part.queries, 0), put(block.k, part.keys, 0), put(block.v, part.keys, 0)
            )
            total = whole if total is None else jax.tree.map(jnp.add, total, whole)
        assert total is not None
        return total

    def _parts(self, index: Any, source: Any) -> Sequence[Pairing]:
        return parts_of(index, source, is_causal=self.is_causal, is_zigzag=self.is_zigzag)
