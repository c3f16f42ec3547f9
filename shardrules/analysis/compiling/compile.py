"""A function compiled for a target, from shapes alone, with everything that the compiler says of it."""

import contextlib
import functools
import os
import re
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, final

import attrs
import jax
import jax.tree_util as jtu
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from shardrules.analysis.compiling.arguments import Arguments, result_shardings
from shardrules.analysis.compiling.constraints import constraints, weakened
from shardrules.analysis.compiling.retarget import on_mesh
from shardrules.analysis.compiling.source import naming_lines
from shardrules.core.axes import mesh_sizes
from shardrules.core.errors import DoesNotFitError
from shardrules.core.finding import plan_error
from shardrules.core.tree import array_kind, leaf_paths

REMATERIALISED = "Involuntary full rematerialization"
"""What XLA says when it gathers a whole array only to cut it in another way."""

_LISTENING = threading.Lock()
_NEEDED = re.compile(r"\(([\d.]+)([KMGT])\) exceeds|Used ([\d.]+)([KMGT]) of")
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_NOISE = re.compile(r"hlo_rematerialization\.cc.*Can't reduce memory use")
"""What compilers say of programs that do not fit: the report says it better."""

_TOLERANT: dict[str, bool | str] = {"xla_tpu_no_crash_on_oom": True}


@final
@attrs.frozen
class CompilerMemory:
    """What one device needs, in the compiler's own words.

    **Arguments:**

    - `argument_bytes`, `output_bytes`: arguments and results.
    - `alias_bytes`: results that are written over arguments.
    - `temporary_bytes`: everything in between.
    - `host_argument_bytes`: the arguments in the host's memory, where the compiler tells them from others.
    """

    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temporary_bytes: int
    host_argument_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        """All of it together, shared memory once."""
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temporary_bytes


@final
@attrs.frozen(eq=False)
class Result:
    """One array that a function returns.

    **Arguments:**

    - `path`: where it is in what the function returns.
    - `struct`: its shape and dtype.
    - `asked`, `at`: where it was asked to be, if anybody said, and where it is.
    """

    path: str
    struct: Any
    asked: NamedSharding | None
    at: Sharding


@final
@attrs.frozen(eq=False)
class Compiled:
    """A function as a compiler made it.

    **Arguments:**

    - `jaxpr`: the program before any compiler saw it.
    - `text`: the compiled program.
    - `memory`: what it needs.
    - `arguments`: where each array of the arguments is.
    - `results`: the arrays that are returned.
    - `donated`: the numbers of the arrays whose memory may be used for results.
    - `messages`: what the compiler said aloud.
    - `refusal`: what it said where it refused the program for its size, before it was asked to go on; else empty.
    """

    jaxpr: ClosedJaxpr
    text: str
    memory: CompilerMemory
    arguments: tuple[Sharding, ...]
    results: tuple[Result, ...]
    donated: tuple[int, ...]
    messages: tuple[str, ...]
    refusal: str


@final
@attrs.frozen(eq=False)
class Traced:
    """A function as JAX traced it, on the mesh that it knows.

    **Arguments:**

    - `fn`: the function.
    - `jaxpr`: its program; of a function that is jitted already, what is inside.
    - `result`: what it returns, with tracers for arrays.
    - `structs`: the shapes of these.
    - `donated`: the numbers of the arguments that a function which is jitted already gives away.
    - `said`: for numbers of arguments where it says that they are to be.
    - `said_of_results`: the same for each result; `None` where it says nothing.
    """

    fn: Callable[..., Any]
    jaxpr: ClosedJaxpr
    result: Any
    structs: tuple[Any, ...]
    donated: tuple[int, ...]
    said: Mapping[int, PartitionSpec]
    said_of_results: tuple[PartitionSpec | None, ...]


def trace(fn: Callable[..., Any], found: Arguments, mesh: Mesh) -> Traced:
    """Traces a function, of which nothing is run.

    **Arguments:**

    - `fn`: the function.
    - `found`: its arguments.
    - `mesh`: the mesh that is in force meanwhile, and that the function may name.

    **Returns:**

    A `Traced`.

    **Raises:**

    Whatever `fn` and JAX raise, with a note that names the line of the user's code; `PlanError` where that is about an
    axis.
    """
    results: list[Any] = []

    def run(*args: Any) -> list[Any]:
        results.append(fn(*found.rebuilt(args)))
        return [leaf for leaf in jtu.tree_leaves(results[-1]) if array_kind(leaf) is not None]

    with jax.set_mesh(mesh), naming_lines():
        traced = jax.jit(run, keep_unused=True).trace(*[one.struct(mesh) for one in found.arrays])
    structs = tuple(jtu.tree_leaves(traced.out_info))
    program = traced.jaxpr.jaxpr
    inner = program.eqns[0] if len(program.eqns) == 1 and program.eqns[0].primitive.name in ("jit", "pjit") else None
    if inner is None:
        return Traced(fn, traced.jaxpr, results[-1], structs, (), {}, (None,) * len(structs))
    numbers = {id(one): number for number, one in enumerate(program.invars)}
    places = [numbers.get(id(one)) for one in inner.invars]
    given, arguments, outputs = (inner.params[name] for name in ("donated_invars", "in_shardings", "out_shardings"))
    said = {
        number: one.spec
        for number, one in zip(places, arguments, strict=True)
        if number is not None and isinstance(one, NamedSharding)
    }
    returned = {
        id(var): one.spec for var, one in zip(inner.outvars, outputs, strict=True) if isinstance(one, NamedSharding)
    }
    # Where it is all that there is, it is taken off: inside are the lines of code, and shardings by name.
    is_all = [*places] == [*range(len(program.invars))] and [*map(id, inner.outvars)] == [*map(id, program.outvars)]
    return Traced(
        fn,
        inner.params["jaxpr"] if is_all and not program.constvars else traced.jaxpr,
        results[-1],
        structs,
        tuple(number for number, is_given in zip(places, given, strict=True) if is_given and number is not None),
        said,
        tuple(returned.get(id(one)) for one in program.outvars),
    )


def compile_for(
    traced: Traced,
    found: Arguments,
    mesh: Mesh,
    out_shardings: Any = None,
    donated: Sequence[int] = (),
    tolerant: bool = False,
) -> Compiled:
    """Compiles a traced function.

    **Arguments:**

    - `traced`: the function. If it was traced on another mesh than `mesh`, that takes its place.
    - `found`: its arguments.
    - `mesh`: the mesh, on devices of the target.
    - `out_shardings`: where results are to be; see `result_shardings`.
    - `donated`: the numbers of the arrays whose memory may be used for results.
    - `tolerant`: whether a compiler that refuses what does not fit should be asked to go on, where it can.

    **Returns:**

    A `Compiled`.

    **Raises:**

    `DoesNotFitError` where the compiler refuses a program that takes too much memory; `PlanError` where it cannot do
    with constraints that do not divide.
    """
    jaxpr = on_mesh(traced.jaxpr, mesh)
    given = tuple(sorted({*donated, *traced.donated}))
    with jax.set_mesh(mesh):
        paths, asked = _asked(traced, out_shardings, mesh)
        run = jax.jit(
            _named(jaxpr_as_fun(jaxpr), traced.fn), out_shardings=asked, keep_unused=True, donate_argnums=given
        )
        with warnings.catch_warnings():
            # What is donated in vain shows in the program itself.
            warnings.filterwarnings("ignore", "Some donated buffers were not usable")
            with naming_lines():
                lowered = run.lower(*[one.struct(mesh) for one in found.arrays])
        with _listening() as said:
            try:
                compiled, refusal = _compiled(lowered, mesh, tolerant)
            except ValueError as error:  # newer JAX has no name for some splits that XLA may choose then
                problems = list(weakened(constraints(jaxpr), mesh_sizes(mesh)))
                if not problems:
                    raise
                raise plan_error("the function cannot be compiled", problems) from error
    usage, text = compiled.memory_analysis(), compiled.as_text()
    assert usage is not None, "every backend of a Target tells"
    assert text is not None, "every backend of a Target tells"
    where = jtu.tree_leaves(compiled.output_shardings)
    return Compiled(
        jaxpr,
        text,
        CompilerMemory(
            usage.argument_size_in_bytes,
            usage.output_size_in_bytes,
            usage.alias_size_in_bytes,
            usage.temp_size_in_bytes,
            usage.host_argument_size_in_bytes,
        ),
        tuple(jtu.tree_leaves(compiled.input_shardings)),
        tuple(map(Result, paths, traced.structs, asked, where)),
        given,
        tuple(said),
        refusal,
    )


def _asked(traced: Traced, out_shardings: Any, mesh: Mesh) -> tuple[list[str], list[NamedSharding | None]]:
    """Paths of the arrays that a function returns, and where they are to be."""
    leaves, treedef = jtu.tree_flatten(traced.result)
    rest = iter(traced.structs)
    shapes = [next(rest) if array_kind(leaf) is not None else leaf for leaf in leaves]
    said = result_shardings(treedef.unflatten(shapes), out_shardings, mesh)
    kept = [array_kind(leaf) is not None for leaf in leaves]
    paths = [path for path, is_array in zip(leaf_paths(traced.result), kept, strict=True) if is_array]
    asked = [one for one, is_array in zip(said, kept, strict=True) if is_array]
    own = [None if spec is None else NamedSharding(mesh, spec) for spec in traced.said_of_results]
    return paths, [one or other for one, other in zip(asked, own, strict=True)]


def _named(run: Callable[..., Any], fn: Callable[..., Any]) -> Callable[..., Any]:
    """`run` under the name of `fn`, by which the compiler calls what is in it."""

    def renamed(*args: Any) -> Any:
        return run(*args)

    renamed.__name__ = name_of(fn)
    return renamed


def name_of(fn: Callable[..., Any]) -> str:
    """Returns what a function is called in a report.

    **Arguments:**

    - `fn`: a function, a method, a partial function, a module that is called.

    **Returns:**

    Its name, or that of its type.

    ```python
    import functools

    assert name_of(functools.partial(name_of)) == "name_of"
    ```
    """
    while isinstance(fn, functools.partial):
        fn = fn.func
    return getattr(fn, "__name__", type(fn).__name__)  # modules and other callables have no name of their own


def _compiled(lowered: jax.stages.Lowered, mesh: Mesh, tolerant: bool) -> tuple[jax.stages.Compiled, str]:
    """The program, and what its compiler said if it refused it first."""
    platform = mesh.devices.flat[0].platform
    try:
        return lowered.compile(), ""
    except jax.errors.JaxRuntimeError as error:
        text = str(error)
        if "RESOURCE_EXHAUSTED" not in text or "vmem" in text.lower():  # a kernel that is too large for the chip
            raise
        first = text.partition("\n")[0].removeprefix("RESOURCE_EXHAUSTED: ")
        if tolerant and platform == "tpu":
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # what is too large by far is refused again
                return lowered.compile(compiler_options=dict(_TOLERANT)), first
        raise DoesNotFitError(
            f"the compiler for {platform} refuses a program that takes more memory than a device has: {first} Split "
            "more, make the batch smaller, or recompute activations (jax.checkpoint)",
            _needed(text),
        ) from error


def _needed(text: str) -> int:
    found = _NEEDED.search(text)
    if found is None:
        return 0
    number, unit = [group for group in found.groups() if group]
    return int(float(number) * _UNITS[unit])


@contextlib.contextmanager
def _listening() -> Iterator[list[str]]:
    """Takes what compilers write to the standard error of the process, and hands on what is not about this program.

    There is one standard error, so that threads which audit take turns in compiling.
    """
    said: list[str] = []
    with _LISTENING, tempfile.TemporaryFile() as heard:
        _flush()
        own = os.dup(2)
        os.dup2(heard.fileno(), 2)
        try:
            yield said
        finally:
            _flush()
            os.dup2(own, 2)
            os.close(own)
            heard.seek(0)
            for line in heard.read().decode(errors="replace").splitlines():
                if REMATERIALISED in line:
                    said.append(line)
                elif not _NOISE.search(line):
                    _pass_on(line)


def _flush() -> None:
    if sys.stderr is not None:  # as in a process without a console
        sys.stderr.flush()


def _pass_on(line: str) -> None:
    os.write(2, f"{line}\n".encode())
