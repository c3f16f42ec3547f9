"""A cross-entropy whose vocabulary is split over devices, declared: logits are never whole, on no device.

Each device takes the scores of its words, a block of them at a time, and the devices exchange two numbers for each row:
the largest logarithm of a sum, and the sum. The backward pass computes the blocks again.
"""

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P

import shardrules as sr


@sr.region("rows dim, vocab dim, rows -> rows", split="rows", exchange="vocab")
def cross_entropy(
    hidden: Array, words: Array, labels: Array, *, axis_name: tuple[str, ...] | None, block: int = 1024
) -> Array:
    """The losses of rows; of each, a device returns a part of a sum."""
    count = len(words)
    block = min(block, count)
    if count % block:
        raise ValueError(f"{count} words are not a multiple of blocks of {block}")

    @jax.checkpoint
    def log_sum(block_words: Array) -> Array:
        scores = jnp.einsum("rd,vd->rv", hidden, block_words, preferred_element_type=jnp.float32)
        return jax.nn.logsumexp(scores, axis=1)

    log_total = jax.nn.logsumexp(lax.map(log_sum, words.reshape(-1, block, words.shape[1])), axis=0)
    first, device_count = 0, 1
    if axis_name:
        first, device_count = lax.axis_index(axis_name) * count, lax.axis_size(axis_name)
        largest = lax.pmax(lax.stop_gradient(log_total), axis_name)
        log_total = largest + jnp.log(lax.psum(jnp.exp(log_total - largest), axis_name))
    # A label is a word of one device; the others add nothing.
    index = labels - first
    is_here = (index >= 0) & (index < count)
    labelled = words[jnp.where(is_here, index, 0)]
    score = jnp.einsum("rd,rd->r", hidden, labelled, preferred_element_type=jnp.float32)
    return log_total / device_count - jnp.where(is_here, score, 0)


def plain_cross_entropy(hidden: Array, words: Array, labels: Array) -> Array:
    return -jnp.take_along_axis(jax.nn.log_softmax(hidden @ words.T), labels[:, None], 1)[:, 0]


def main() -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    mesh = sr.create_mesh("data:2,model:4")

    def loss(hidden: Array, words: Array, labels: Array) -> Array:
        return cross_entropy(hidden, words, labels, block=512).mean()

    keys = jax.random.split(jax.random.key(0), 3)
    hidden, words = jax.random.normal(keys[0], (64, 32)), jax.random.normal(keys[1], (8192, 32))
    labels = jax.random.randint(keys[2], (64,), 0, 8192)
    arrays, specs = (hidden, words, labels), (P("data"), P("model"), P("data"))
    placed = [sr.filter_shard(array, spec, mesh) for array, spec in zip(arrays, specs, strict=True)]
    step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
    report = sr.audit(step, *placed, mesh=mesh)
    print("sent:", *((collective.kind, collective.axes) for collective in report.collectives))
    expected = jax.value_and_grad(lambda *arrays: plain_cross_entropy(*arrays).mean(), argnums=(0, 1))(*arrays)
    differences = jax.tree.map(lambda a, b: float(abs(a - b).max()), step(*placed), expected)
    print("differs by:", max(jax.tree.leaves(differences)))


if __name__ == "__main__":
    main()
