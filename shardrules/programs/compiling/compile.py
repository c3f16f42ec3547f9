"""Compiles a function for a target, from shapes alone, and keeps everything that the compiler reports."""

import contextlib
import itertools
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
import numpy as np
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.sharding import AbstractMesh, Mesh, NamedSharding, Sharding

from shardrules.core.axes import AnyMesh, mesh_sizes
from shardrules.core.boxes import ArgumentVariables
from shardrules.core.callables import name_of
from shardrules.core.errors import CompileError, DoesNotFitError, MissingCompilerError
from shardrules.core.finding import plan_error
from shardrules.core.tree import array_kind, leaf_paths
from shardrules.programs.compiling.arguments import Arguments, requested_memory, result_shardings
from shardrules.programs.compiling.constraints import find_constraints, weakened_constraints
from shardrules.programs.compiling.flags import Options
from shardrules.programs.compiling.retarget import retarget
from shardrules.programs.compiling.source import names_other_mesh, naming_lines
from shardrules.programs.jaxprs.calls import is_jit

REMATERIALISED = "Involuntary full rematerialization"
"""In XLA's warning when it gathers a whole array only to split it in another way."""

_STDERR_LOCK = threading.Lock()
"""A process has one standard error, so threads that read it take turns in compiling."""

# libtpu: "... (19.31G) exceeds ..." or "Used 19.31G of 15.75G hbm". The numbers are rounded.
_NEEDED = re.compile(r"\(([\d.]+)([KMGT])\) exceeds|Used ([\d.]+)([KMGT]) of")
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}

_NOISE = re.compile(r"hlo_rematerialization\.cc.*Can't reduce memory use")
"""XLA's warning for programs that do not fit: the report says the same, with numbers."""

_LACKS_CUDNN = re.compile(r"cuDNN (is )?not (found|detected)")
"""JAX's errors where the library is missing: it asks for its version before it calls cuDNN's attention."""

_TOLERANT: Options = {"xla_tpu_no_crash_on_oom": True}
"""Makes libtpu finish a program that is larger than the memory, as the compilers for CPUs and GPUs always do."""

_UNTILED = re.compile(r"[Tt]il(e sizes|ing)|[Tt]riton")
"""In XLA's errors where it has no tiles for a matmul that it fused for Triton: those it would find by running some on a
GPU, which compiling without one cannot."""

_WITHOUT_TRITON: Options = {"xla_gpu_enable_triton_gemm": False}
"""Makes XLA leave matmuls to cuBLAS."""


@final
@attrs.frozen
class CompilerMemory:
    """The memory that one device needs, as the compiler reports it."""

    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    """Results that are written over donated arguments: they count as both."""
    temporary_bytes: int
    host_argument_bytes: int = 0
    """Arguments in the host's memory, where the compiler counts them apart."""
    flag: str = ""
    """The flag without which the compiler fails, as in `CompileError`."""

    @property
    def peak_bytes(self) -> int:
        """The sum, with aliased memory counted once."""
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temporary_bytes


@final
@attrs.frozen(eq=False)
class ResultArray:
    """An array that a function returns: its path in the result, the requested sharding, and the compiled one."""

    path: str
    struct: Any
    requested: NamedSharding | None
    sharding: Sharding


@final
@attrs.frozen(eq=False)
class Compiled:
    """A compiled function."""

    jaxpr: ClosedJaxpr
    text: str
    """The compiled program, as XLA prints it."""
    memory: CompilerMemory
    argument_shardings: tuple[Sharding, ...]
    results: tuple[ResultArray, ...]
    donated: tuple[int, ...]
    """The indices of the arrays whose memory results may reuse."""
    messages: tuple[str, ...]
    """XLA's warnings on standard error about rematerialized arrays."""
    refusal: str
    """The compiler's error where it refused the program for its size before it was asked to go on; else empty."""


@final
@attrs.frozen(eq=False)
class Traced:
    """A function as JAX traced it, on the mesh that it knows. For a jitted function, the program inside the jit."""

    fn: Callable[..., Any]
    jaxpr: ClosedJaxpr
    result: Any
    """The function's result, with tracers for arrays."""
    structs: tuple[Any, ...]
    """The shapes of the arrays in `result`, and of those that the function writes to variables of its arguments."""
    written: tuple[int, ...]
    """The indices of the arrays of the arguments in whose place it writes."""
    donated: tuple[int, ...]
    """The indices of the arrays that a jitted function donates itself."""
    input_shardings: Mapping[int, NamedSharding]
    """The shardings that a jitted function has itself, by the index of the array."""
    output_shardings: tuple[NamedSharding | None, ...]


def trace(fn: Callable[..., Any], arguments: Arguments, mesh: Mesh) -> Traced:
    """Traces a function with a mesh like `mesh` in force. Errors get a note with the user's line.

    JAX refuses a function that names a mesh of the same axes on another kind of device, or on none: there it is traced
    on such a mesh. Which one it names is known only when it is called.
    """
    try:
        return _trace_on(fn, arguments, mesh)
    except RuntimeError as error:
        if not _LACKS_CUDNN.match(str(error)):
            raise
        raise MissingCompilerError(
            f'{name_of(fn)} calls cuDNN, whose package is not installed: pip install "shardrules[cudnn]". With it, '
            "functions that call cuDNN compile for CUDA targets without a GPU"
        ) from error
    except ValueError as error:
        if not names_other_mesh(error):
            raise
        refusal = error
    for other in _of_other_kinds(mesh.abstract_mesh):
        try:
            return _trace_on(fn, arguments, other)
        except ValueError as error:
            if not names_other_mesh(error):
                raise
    raise refusal


def _of_other_kinds(mesh: AbstractMesh) -> Iterator[AbstractMesh]:
    """The same axes on no kind of device, as `mesh_shape` has them, and on the devices that this process has."""
    here = Mesh(np.asarray(jax.devices()[:1]), ("here",)).abstract_mesh.abstract_device
    for kind in (None, here):
        if kind != mesh.abstract_device:
            yield mesh.update(abstract_device=kind)


def _trace_on(fn: Callable[..., Any], arguments: Arguments, mesh: AnyMesh) -> Traced:
    results: list[Any] = []
    written: list[int] = []

    def run(*arrays: Any) -> list[Any]:
        args = arguments.rebuild(arrays)
        variables = ArgumentVariables.of(args)
        results.append(fn(*args))
        # An array written to an argument is a result, too: a step of flax nnx may return nothing but its loss.
        indices = {id(array): index for index, array in enumerate(arrays)}
        writes = {
            indices[id(old)]: new for old, new in variables.pairs(variables.writes("audit")) if id(old) in indices
        }
        written[:] = writes
        return [leaf for leaf in (*jtu.tree_leaves(results[-1]), *writes.values()) if array_kind(leaf) is not None]

    in_force = jax.set_mesh(mesh) if isinstance(mesh, Mesh) else jax.sharding.use_abstract_mesh(mesh)
    with in_force, naming_lines():
        traced = jax.jit(run, keep_unused=True).trace(*[array.struct(mesh) for array in arguments.arrays])
    return _unwrapped(fn, traced, results[-1], tuple(written))


def _unwrapped(fn: Callable[..., Any], traced: Any, result: Any, written: tuple[int, ...]) -> Traced:
    """The parts of a trace. Of a function that is jitted itself, they are its own `jax.jit`'s."""
    structs = tuple(jtu.tree_leaves(traced.out_info))
    program = traced.jaxpr.jaxpr
    # A jitted function is one single `jit` equation, whose parameters are what its `jax.jit` was called with.
    inner = program.eqns[0] if len(program.eqns) == 1 and is_jit(program.eqns[0]) else None
    if inner is None:
        return Traced(fn, traced.jaxpr, result, structs, written, (), {}, (None,) * len(structs))
    index_of = {id(variable): index for index, variable in enumerate(program.invars)}
    # `None`: an array that the function closes over.
    input_indices = [index_of.get(id(variable)) for variable in inner.invars]
    donated, in_shardings, out_shardings = (
        inner.params[name] for name in ("donated_invars", "in_shardings", "out_shardings")
    )
    input_shardings = {
        index: sharding
        for index, sharding in zip(input_indices, in_shardings, strict=True)
        if index is not None and isinstance(sharding, NamedSharding)
    }
    output_shardings = {
        id(variable): sharding
        for variable, sharding in zip(inner.outvars, out_shardings, strict=True)
        if isinstance(sharding, NamedSharding)
    }
    # If the jit takes and returns all arrays in order, its inside is the program. There equations have their own lines
    # of code, and constraints their shardings; seen from outside, everything is on the line of the call.
    is_whole = [*input_indices] == [*range(len(program.invars))] and (
        [*map(id, inner.outvars)] == [*map(id, program.outvars)]
    )
    return Traced(
        fn,
        inner.params["jaxpr"] if is_whole and not program.constvars else traced.jaxpr,
        result,
        structs,
        written,
        tuple(
            index for index, is_donated in zip(input_indices, donated, strict=True) if is_donated and index is not None
        ),
        input_shardings,
        tuple(output_shardings.get(id(variable)) for variable in program.outvars),
    )


def compile_for(
    traced: Traced,
    arguments: Arguments,
    mesh: Mesh,
    out_shardings: Any = None,
    donated: Sequence[int] = (),
    tolerant: bool = False,
    options: Options | None = None,
) -> Compiled:
    """Compiles a traced function for `mesh`, which replaces the mesh that it was traced on.

    `donated` are indices of arrays. With `tolerant`, a compiler that refuses what does not fit
    compiles it all the same, if it can. `options` are the target's flags.
    """
    jaxpr = retarget(traced.jaxpr, mesh)
    all_donated = tuple(sorted({*donated, *traced.donated}))
    with jax.set_mesh(mesh):
        paths, requested = _requested_shardings(traced, arguments, out_shardings, mesh)
        # `keep_unused`: XLA would drop unused arguments, and with them the memory that they take on the device.
        run = jax.jit(
            _renamed(jaxpr_as_fun(jaxpr), traced.fn),
            out_shardings=requested,
            keep_unused=True,
            donate_argnums=all_donated,
        )
        with warnings.catch_warnings():
            # The compiled program itself shows which donated arrays are not reused.
            warnings.filterwarnings("ignore", "Some donated buffers were not usable")
            with naming_lines():
                lowered = run.lower(*[array.struct(mesh) for array in arguments.arrays])
        with _capturing_stderr() as messages:
            try:
                compiled, refusal = _compile(lowered, mesh, tolerant, options or {})
            except ValueError as error:
                # For constraints that do not divide XLA may choose splits that no PartitionSpec can express. JAX 0.12
                # raises on these when it builds the output shardings.
                problems = list(weakened_constraints(find_constraints(jaxpr), mesh_sizes(mesh)))
                if not problems:
                    raise
                raise plan_error("the function cannot be compiled", problems) from error
    text = compiled.as_text()
    assert text is not None, "every backend of a Target prints its program"
    output_shardings = jtu.tree_leaves(compiled.output_shardings)
    return Compiled(
        jaxpr,
        text,
        _memory_of(compiled),
        tuple(jtu.tree_leaves(compiled.input_shardings)),
        tuple(ResultArray(*parts) for parts in zip(paths, traced.structs, requested, output_shardings, strict=True)),
        all_donated,
        tuple(messages),
        refusal,
    )


def compiled_memory(lowered: jax.stages.Lowered, mesh: Mesh) -> CompilerMemory:
    """Returns the memory of a lowered function that is compiled for `mesh`, with the flag that it compiles with, if it
    needs one."""
    with _capturing_stderr():
        try:
            compiled, _ = _compile(lowered, mesh, tolerant=True, options={})
        except CompileError as error:
            if not error.flag:
                raise
            compiled, _ = _compile(lowered, mesh, tolerant=True, options=_WITHOUT_TRITON)
            return attrs.evolve(_memory_of(compiled), flag=error.flag)
    return _memory_of(compiled)


def _memory_of(compiled: jax.stages.Compiled) -> CompilerMemory:
    # XLA plans the memory while it compiles, so that nothing has to run for it.
    usage = compiled.memory_analysis()
    assert usage is not None, "every backend of a Target reports its memory"
    return CompilerMemory(
        usage.argument_size_in_bytes,
        usage.output_size_in_bytes,
        usage.alias_size_in_bytes,
        usage.temp_size_in_bytes,
        usage.host_argument_size_in_bytes,
    )


def _requested_shardings(
    traced: Traced, arguments: Arguments, out_shardings: Any, mesh: Mesh
) -> tuple[list[str], list[NamedSharding | None]]:
    """The paths of the arrays that a function returns, and their requested shardings: the caller's, else its own."""
    leaves, treedef = jtu.tree_flatten(traced.result)
    is_array = [array_kind(leaf) is not None for leaf in leaves]
    structs = iter(traced.structs)
    shapes = [next(structs) if has_struct else leaf for leaf, has_struct in zip(leaves, is_array, strict=True)]
    of_leaves = result_shardings(treedef.unflatten(shapes), out_shardings, mesh)
    paths = list(itertools.compress(leaf_paths(traced.result), is_array))
    of_arrays = list(itertools.compress(of_leaves, is_array))
    # An array written to an argument stays where the argument is.
    targets = [arguments.arrays[index] for index in traced.written]
    paths += [target.path for target in targets]
    of_arrays += [None if target.spec is None else NamedSharding(mesh, target.spec) for target in targets]
    of_function = [
        None if sharding is None else NamedSharding(mesh, sharding.spec, memory_kind=requested_memory(sharding))
        for sharding in traced.output_shardings
    ]
    return paths, [by_caller or by_function for by_caller, by_function in zip(of_arrays, of_function, strict=True)]


def _renamed(run: Callable[..., Any], fn: Callable[..., Any]) -> Callable[..., Any]:
    """`run` under the name of `fn`, which XLA gives to the program and to the paths of its operations."""

    def renamed(*args: Any) -> Any:
        return run(*args)

    renamed.__name__ = name_of(fn)
    return renamed


def _compile(
    lowered: jax.stages.Lowered, mesh: Mesh, tolerant: bool, options: Options
) -> tuple[jax.stages.Compiled, str]:
    """The program, and the compiler's error if it refused the program for its size at first."""
    platform = mesh.devices.flat[0].platform
    try:
        return lowered.compile(compiler_options=options or None), ""
    except jax.errors.JaxRuntimeError as error:
        text = str(error)
        # A kernel that overflows VMEM, or the shared memory of a GPU, has the same code: no mesh helps it.
        if "RESOURCE_EXHAUSTED" not in text or any(word in text.lower() for word in ("vmem", "shared memory")):
            raise _compile_error(mesh, error, options) from error
        first_line = text.partition("\n")[0].removeprefix("RESOURCE_EXHAUSTED: ")
        if tolerant and platform == "tpu":
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # a program that is far too large is refused again
                return lowered.compile(compiler_options={**options, **_TOLERANT}), first_line
        raise DoesNotFitError(
            f"the compiler for {platform} refuses a program that takes more memory than a device has: {first_line} "
            "Split more, make the batch smaller, or recompute activations (jax.checkpoint)",
            _needed_bytes(text),
        ) from error


def _compile_error(mesh: Mesh, error: Exception, options: Options) -> CompileError:
    """The error for what a compiler says, with the flag that avoids it if one is known that is not set."""
    platform, text = mesh.devices.flat[0].platform, str(error)
    words = text.partition("\n")[0][:400] or type(error).__name__  # the cause has all of it
    message = f"the compiler for {platform} fails: {words}"
    (name,) = _WITHOUT_TRITON
    if platform != "gpu" or name in options or not _UNTILED.search(text):
        return CompileError(message)
    flag = f"{name}=false"
    return CompileError(
        f"{message}. It lacks the tiles of a matmul, which it finds by measuring where there is a GPU. Add --{flag} to "
        f'the target, as in target="cuda:h100:8 --{flag}"',
        flag,
    )


def _needed_bytes(text: str) -> int:
    """The memory in libtpu's error; 0 where it names none."""
    match = _NEEDED.search(text)
    if match is None:
        return 0
    amount, unit = [group for group in match.groups() if group]
    return int(float(amount) * _UNITS[unit])


@contextlib.contextmanager
def _capturing_stderr() -> Iterator[list[str]]:
    """Collects XLA's warnings about rematerialization, and passes everything else on but `_NOISE`. The list is filled
    when the context ends.

    XLA has no other channel for them than the standard error of the process, file descriptor 2: Python's `sys.stderr`
    does not see what C++ writes.
    """
    messages: list[str] = []
    with _STDERR_LOCK, tempfile.TemporaryFile() as captured:
        _flush()
        stderr = os.dup(2)
        os.dup2(captured.fileno(), 2)
        try:
            yield messages
        finally:
            _flush()
            os.dup2(stderr, 2)
            os.close(stderr)
            captured.seek(0)
            for line in captured.read().decode(errors="replace").splitlines():
                if REMATERIALISED in line:
                    messages.append(line)
                elif not _NOISE.search(line):
                    os.write(2, f"{line}\n".encode())


def _flush() -> None:
    if sys.stderr is not None:  # a process without a console has none
        sys.stderr.flush()
