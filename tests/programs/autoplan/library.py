"""A call of each public function of the modules of JAX that users compute with, to trace."""

import inspect
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, final

import attrs
import jax
import jax.nn
import jax.numpy as jnp
import jax.ops
import jax.scipy as jsp
import jax.scipy.cluster.vq
import jax.scipy.ndimage
import jax.scipy.optimize
import jax.scipy.signal
import jax.scipy.sparse.linalg
import jax.scipy.stats


@final
@attrs.frozen
class Call:
    """A function and its arrays. `has_gradient`: whether it is differentiable in all that are floats."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    has_gradient: bool = False


STACK = jax.ShapeDtypeStruct((4, 6, 6), jnp.float32)
MATRIX, ROWS = jax.ShapeDtypeStruct((6, 6), jnp.float32), jax.ShapeDtypeStruct((4, 6), jnp.float32)
COUNTS, INDICES = jax.ShapeDtypeStruct((4, 6), jnp.int32), jax.ShapeDtypeStruct((6,), jnp.int32)
VECTOR, COMPLEX = jax.ShapeDtypeStruct((6,), jnp.float32), jax.ShapeDtypeStruct((4, 6), jnp.complex64)
SOME, SEED = jax.ShapeDtypeStruct((3,), jnp.int32), jax.ShapeDtypeStruct((), jnp.uint32)
KEY = jax.eval_shape(lambda: jax.random.key(0))

FAMILIES: tuple[tuple[str, ModuleType, tuple[Any, ...], str], ...] = (
    (
        "ops",
        jax.ops,
        (ROWS, jax.ShapeDtypeStruct((4,), jnp.int32), 3),
        "segment_max segment_min segment_prod segment_sum",
    ),
    (
        "linalg",
        jnp.linalg,
        (STACK,),
        """
            cholesky cond det diagonal eig eigh eigvals eigvalsh inv matrix_norm matrix_rank
            matrix_transpose norm pinv qr slogdet svd svdvals trace vector_norm
        """,
    ),
    ("linalg", jnp.linalg, (STACK, STACK), "matmul solve vecdot"),
    ("linalg", jnp.linalg, (VECTOR, VECTOR), "outer"),
    ("fft", jnp.fft, (COMPLEX,), "fft fft2 fftn fftshift hfft ifft ifft2 ifftn ifftshift irfft irfft2 irfftn"),
    ("fft", jnp.fft, (6,), "fftfreq rfftfreq"),
    ("fft", jnp.fft, (ROWS,), "ihfft rfft rfft2 rfftn"),
    (
        "nn",
        jax.nn,
        (ROWS,),
        """
            celu elu gelu hard_sigmoid hard_silu hard_swish hard_tanh identity leaky_relu log1mexp
            log_sigmoid log_softmax logmeanexp logsumexp mish relu relu6 selu sigmoid silu soft_sign softmax
            softplus sparse_plus sparse_sigmoid squareplus standardize swish tanh
        """,
    ),
    (
        "random",
        jax.random,
        (KEY,),
        """
            bernoulli bits cauchy clone exponential gumbel key_data key_impl laplace logistic lognormal
            maxwell normal rademacher split uniform
        """,
    ),
    ("random", jax.random, (KEY, ROWS, ROWS), "beta binomial double_sided_maxwell f truncated_normal weibull_min"),
    (
        "random",
        jax.random,
        (KEY, ROWS),
        """
            categorical chisquare dirichlet gamma geometric loggamma pareto permutation poisson rayleigh t
            wald
        """,
    ),
    ("random", jax.random, (KEY, 3), "fold_in generalized_normal"),
    (
        "scipy.linalg",
        jsp.linalg,
        (MATRIX,),
        """
            block_diag cho_factor cholesky circulant companion det eigh expm fiedler fiedler_companion
            hankel hessenberg inv lu lu_factor polar qr schur sqrtm svd toeplitz
        """,
    ),
    ("scipy.linalg", jsp.linalg, (6,), "dft helmert hilbert invhilbert invpascal pascal"),
    ("scipy.linalg", jsp.linalg, (MATRIX, MATRIX), "qr_multiply solve solve_triangular"),
    (
        "scipy.special",
        jsp.special,
        (ROWS, ROWS),
        "beta betaln boxcox boxcox1p gammainc gammaincc kl_div owens_t poch rel_entr xlog1py xlogy zeta",
    ),
    ("scipy.special", jsp.special, (ROWS, ROWS, ROWS), "betainc hyp1f1"),
    (
        "scipy.special",
        jsp.special,
        (ROWS,),
        """
            dawsn digamma entr erf erfc erfcinv erfcx erfinv exp1 expi expit factorial fresnel gamma gammaln
            gammasgn i0 i0e i1 i1e log_ndtr log_softmax loggamma logit logsumexp ndtr ndtri sici softmax
            spence wofz
        """,
    ),
    ("scipy.special", jsp.special, (ROWS, ROWS, ROWS, ROWS), "hyp2f1"),
    ("scipy.signal", jsp.signal, (VECTOR, VECTOR), "convolve correlate fftconvolve"),
    ("scipy.signal", jsp.signal, (ROWS, ROWS), "convolve2d correlate2d"),
    ("scipy.signal", jsp.signal, (ROWS,), "detrend"),
    ("scipy.fft", jsp.fft, (ROWS,), "dct dctn idct idctn"),
    ("scipy.integrate", jsp.integrate, (ROWS,), "trapezoid"),
)
"""Functions of a module that take the same arguments."""

OF_THEIR_OWN: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "linalg.multi_dot": (lambda x: jnp.linalg.multi_dot([x, x, x]), (MATRIX,)),
    "linalg.matrix_power": (lambda x: jnp.linalg.matrix_power(x, 3), (STACK,)),
    "linalg.tensorinv": (jnp.linalg.tensorinv, (jax.ShapeDtypeStruct((2, 3, 6), jnp.float32),)),
    "linalg.cross": (jnp.linalg.cross, (jax.ShapeDtypeStruct((4, 3), jnp.float32),) * 2),
    "linalg.lstsq": (jnp.linalg.lstsq, (MATRIX, VECTOR)),
    "nn.glu": (jax.nn.glu, (ROWS,)),
    "nn.one_hot": (lambda x: jax.nn.one_hot(x, 8), (COUNTS,)),
    "nn.dot_product_attention": (jax.nn.dot_product_attention, (jax.ShapeDtypeStruct((4, 6, 2, 8), jnp.float32),) * 3),
    "random.choice": (lambda key, x: jax.random.choice(key, x, (2,), replace=False), (KEY, VECTOR)),
    "random.multivariate_normal": (jax.random.multivariate_normal, (KEY, VECTOR, MATRIX)),
    "random.multinomial": (lambda key, p: jax.random.multinomial(key, 3.0, p), (KEY, VECTOR)),
    "random.randint": (lambda key: jax.random.randint(key, (4, 6), 0, 9), (KEY,)),
    "random.key": (jax.random.key, (SEED,)),
    "random.PRNGKey": (jax.random.PRNGKey, (SEED,)),
    "random.wrap_key_data": (jax.random.wrap_key_data, (jax.ShapeDtypeStruct((4, 2), jnp.uint32),)),
    "random.ball": (lambda key: jax.random.ball(key, 3, shape=(4,)), (KEY,)),
    "random.orthogonal": (lambda key: jax.random.orthogonal(key, 4, (2,)), (KEY,)),
    "scipy.linalg.cho_solve": (lambda a, b: jsp.linalg.cho_solve((a, True), b), (MATRIX, VECTOR)),
    "scipy.linalg.lu_solve": (lambda a, p, b: jsp.linalg.lu_solve((a, p), b), (MATRIX, INDICES, VECTOR)),
    "scipy.linalg.solve_sylvester": (jsp.linalg.solve_sylvester, (MATRIX,) * 3),
    "scipy.linalg.eigh_tridiagonal": (
        lambda d, e: jsp.linalg.eigh_tridiagonal(d, e, eigvals_only=True),
        (VECTOR, jax.ShapeDtypeStruct((5,), jnp.float32)),
    ),
    "scipy.linalg.funm": (lambda x: jsp.linalg.funm(x, jnp.exp, disp=False), (MATRIX,)),
    "scipy.linalg.expm_frechet": (jsp.linalg.expm_frechet, (MATRIX, MATRIX)),
    "scipy.linalg.convolution_matrix": (lambda x: jsp.linalg.convolution_matrix(x, 6), (VECTOR,)),
    "scipy.linalg.rsf2csf": (jsp.linalg.rsf2csf, (MATRIX, MATRIX)),
    "scipy.special.bernoulli": (lambda: jsp.special.bernoulli(4), ()),
    "scipy.special.bessel_jn": (lambda x: jsp.special.bessel_jn(x, v=2), (VECTOR,)),
    "scipy.special.polygamma": (jsp.special.polygamma, (COUNTS, ROWS)),
    "scipy.special.multigammaln": (lambda x: jsp.special.multigammaln(x, 2), (ROWS,)),
    "scipy.special.expn": (jsp.special.expn, (COUNTS, ROWS)),
    "scipy.special.comb": (lambda x: jsp.special.comb(x, 2), (ROWS,)),
    "scipy.special.sph_harm_y": (
        lambda n, m, a, b: jsp.special.sph_harm_y(n, m, a, b, n_max=4),
        (INDICES, INDICES, VECTOR, VECTOR),
    ),
    "scipy.signal.stft": (lambda x: jsp.signal.stft(x, nperseg=4), (ROWS,)),
    "scipy.signal.csd": (lambda x: jsp.signal.csd(x, x, nperseg=4), (ROWS,)),
    "scipy.signal.welch": (lambda x: jsp.signal.welch(x, nperseg=4), (ROWS,)),
    "scipy.signal.istft": (jsp.signal.istft, (jax.ShapeDtypeStruct((129, 8), jnp.complex64),)),
    "scipy.ndimage.map_coordinates": (lambda x, y: jsp.ndimage.map_coordinates(x, [y, y], 1), (MATRIX, VECTOR)),
    "scipy.cluster.vq": (jax.scipy.cluster.vq.vq, (ROWS, ROWS)),
    "scipy.sparse.linalg.cg": (lambda a, b: jsp.sparse.linalg.cg(a, b)[0], (MATRIX, VECTOR)),
    "scipy.sparse.linalg.gmres": (lambda a, b: jsp.sparse.linalg.gmres(a, b)[0], (MATRIX, VECTOR)),
    "scipy.sparse.linalg.bicgstab": (lambda a, b: jsp.sparse.linalg.bicgstab(a, b)[0], (MATRIX, VECTOR)),
    "scipy.optimize.minimize": (
        lambda x: jax.scipy.optimize.minimize(lambda y: (y**2).sum(), x, method="BFGS").x,
        (VECTOR,),
    ),
    "scipy.stats.norm.logpdf": (jsp.stats.norm.logpdf, (ROWS,)),
    "scipy.stats.gaussian_kde": (lambda x, y: jsp.stats.gaussian_kde(x)(y), (VECTOR, VECTOR)),
    "scipy.stats.rankdata": (jsp.stats.rankdata, (ROWS,)),
    "scipy.stats.mode": (jsp.stats.mode, (ROWS,)),
    "numpy.searchsorted": (jnp.searchsorted, (VECTOR, VECTOR)),
    "numpy.nonzero": (lambda x: jnp.nonzero(x, size=4), (ROWS,)),
    "numpy.unique": (lambda x: jnp.unique(x, size=4), (VECTOR,)),
    "numpy.interp": (jnp.interp, (VECTOR, VECTOR, VECTOR)),
    "numpy.histogram": (jnp.histogram, (VECTOR,)),
    "numpy.median": (jnp.median, (ROWS,)),
    "numpy.bincount": (lambda x: jnp.bincount(x, length=4), (INDICES,)),
    "numpy.convolve": (jnp.convolve, (VECTOR, VECTOR)),
    "numpy.piecewise": (lambda x: jnp.piecewise(x, [x > 0], [jnp.sin, jnp.cos]), (VECTOR,)),
    "at.add": (lambda x, i, y: x.at[i].add(y), (ROWS, SOME, VECTOR)),
    "at.multiply": (lambda x, i, y: x.at[i].mul(y), (ROWS, SOME, VECTOR)),
    "at.max": (lambda x, i, y: x.at[i].max(y), (ROWS, SOME, VECTOR)),
    "at.get": (lambda x, i: x.at[i].get(mode="fill"), (ROWS, SOME)),
    "linalg.tensordot": (lambda x, y: jnp.linalg.tensordot(x, y, axes=1), (MATRIX, VECTOR)),
    "linalg.tensorsolve": (jnp.linalg.tensorsolve, (MATRIX, VECTOR)),
    "random.triangular": (lambda key: jax.random.triangular(key, 0.0, 0.5, 1.0, (4, 6)), (KEY,)),
    "scipy.linalg.hadamard": (lambda: jsp.linalg.hadamard(4), ()),
    "scipy.linalg.leslie": (jsp.linalg.leslie, (VECTOR, jax.ShapeDtypeStruct((5,), jnp.float32))),
}
"""Functions with other arguments, and functions of other modules."""

NO_GRADIENT = """
at.multiply linalg.eig linalg.matrix_rank numpy.nonzero numpy.searchsorted ops.segment_prod random.categorical
random.geometric random.poisson scipy.linalg.eigh_tridiagonal scipy.linalg.funm scipy.linalg.hessenberg
scipy.linalg.polar scipy.linalg.qr_multiply scipy.linalg.schur scipy.linalg.solve_sylvester scipy.linalg.sqrtm
scipy.optimize.minimize scipy.special.betainc
"""

NOT_CALLED = {
    "random.Key": "is a type",
    "random.key_dtype": "returns a dtype",
    "nn.get_scaled_dot_general_config": "returns settings",
    "nn.scaled_matmul": "is for Blackwell GPUs",
    "nn.scaled_dot_general": "is for Blackwell GPUs",
}
"""Public functions that compute nothing, or not everywhere."""

MODULES = {name: module for name, module, _, _ in FAMILIES}


def public_functions() -> Iterator[str]:
    for family, module in MODULES.items():
        for name, value in vars(module).items():
            if not name.startswith("_") and callable(value) and not inspect.isclass(value):
                yield f"{family}.{name}"


def with_arrays(fn: Callable[..., Any], args: tuple[Any, ...]) -> Call:
    """A function with what is no array in its place already."""
    arrays = [index for index, arg in enumerate(args) if isinstance(arg, jax.ShapeDtypeStruct)]

    def run(*values: Any) -> list[Any]:
        values_by_index = dict(zip(arrays, values, strict=True))
        results = fn(*(values_by_index.get(index, arg) for index, arg in enumerate(args)))
        return [leaf for leaf in jax.tree.leaves(results) if hasattr(leaf, "dtype")]

    return Call(run, tuple(args[index] for index in arrays))


def calls() -> dict[str, Call]:
    named = {
        f"{family}.{name}": with_arrays(getattr(module, name), args)
        for family, module, args, names in FAMILIES
        for name in names.split()
        if hasattr(module, name)  # some are newer than others
    }
    named |= {name: with_arrays(fn, args) for name, (fn, args) in OF_THEIR_OWN.items()}
    return {
        name: attrs.evolve(
            call,
            has_gradient=name not in NO_GRADIENT.split()
            and any(jnp.issubdtype(arg.dtype, jnp.floating) for arg in call.args),
        )
        for name, call in named.items()
    }


CALLS = calls()
