"""The shapes of matmuls: how many products of an (m, k) with a (k, n) matrix an operation is.

Hardware reaches a rate that depends on these sizes, so the number of FLOPs alone does not say how long a matmul takes.
"""

import math
import re
from collections.abc import Iterable, Mapping
from typing import final

import attrs

from shardrules.programs.compiled.text import ArrayType


@final
@attrs.frozen
class Product:
    """`batch` products of an (m, k) with a (k, n) matrix, each a matmul of its own."""

    batch: int
    m: int
    n: int
    k: int
    whole_blocks: tuple[int, int, int] | None = None
    """The sizes with which the kernel multiplies, where it works in blocks: the rest of one takes as long as all."""

    @property
    def flops(self) -> int:
        """Two FLOPs for each product that is summed."""
        return 2 * self.batch * self.m * self.n * self.k


def dot_product(
    left: ArrayType, right: ArrayType, contracted: Iterable[int], right_contracted: Iterable[int], batch: Iterable[int]
) -> Product:
    """Returns the shape of a dot; `contracted` and `batch` are dims of `left`."""
    contracted, batch = list(contracted), list(batch)
    inner = math.prod(left.shape[dim] for dim in contracted)
    count = math.prod(left.shape[dim] for dim in batch)
    shared = math.prod(right.shape[dim] for dim in right_contracted) * count
    return Product(count, left.size // max(1, inner * count), right.size // max(1, shared), inner)


@final
@attrs.frozen
class Convolution:
    """A convolution by its labels, its window and its arrays:

    window={size=3x3 stride=2x2 pad=1_1x1_1 lhs_dilate=1x1 rhs_dilate=1x1}, dim_labels=b01f_01io->b01f
    """

    attributes: Mapping[str, str]
    image: ArrayType
    kernel: ArrayType
    result: ArrayType

    def flops(self) -> int:
        """Returns the FLOPs without products with the zeros of padding and dilation."""
        # Grouped convolutions need no case of their own: `i` of the kernel is the size of one group.
        _, kernel_sizes, result_sizes = self._sizes()
        flops = 2 * result_sizes["b"] * result_sizes["f"] * kernel_sizes["i"]
        return flops * math.prod(products for *_, products in self._spatial())

    def product(self) -> Product:
        """Returns the matmul that it is: TPUs write every matmul as a convolution.

        A spatial dim along which each result meets one element of a kernel of its own is a batch dim, or has columns if
        the image has a single element there. Along any other, results are rows, and what each sums is contracted.
        """
        _, kernel_sizes, result_sizes = self._sizes()
        batch, rows, columns, inner = 1, result_sizes["b"], result_sizes["f"], kernel_sizes["i"]
        for image, result, kernel, products in self._spatial():
            if products == result == kernel and image == 1:
                columns *= result
            elif products == result == kernel:
                batch *= result
            else:
                rows *= result
                inner *= max(1, round(products / max(1, result)))
        return Product(batch, rows, columns, inner)

    def _sizes(self) -> list[dict[str, int]]:
        labels = re.split(r"_|->", self.attributes["dim_labels"])
        arrays = (self.image, self.kernel, self.result)
        return [dict(zip(label, array.shape, strict=True)) for label, array in zip(labels, arrays, strict=True)]

    def _spatial(self) -> list[tuple[int, int, int, int]]:
        """For each spatial dim the sizes of image, result and kernel, and how many pairs of the latter meet an image
        element."""
        image_sizes, kernel_sizes, result_sizes = self._sizes()
        window = dict(re.findall(r"(\w+)=(\S+)", self.attributes.get("window", "").strip("{}")))
        spatial = []
        for label in sorted(label for label in result_sizes if label.isdigit()):
            dim = int(label)
            count = _products(
                image_sizes[label],
                kernel_sizes[label],
                result_sizes[label],
                _window_field(window, "stride", dim),
                _window_field(window, "lhs_dilate", dim),
                _window_field(window, "rhs_dilate", dim),
                int(window["pad"].split("x")[dim].split("_")[0]) if "pad" in window else 0,
            )
            spatial.append((image_sizes[label], result_sizes[label], kernel_sizes[label], count))
        return spatial


def _window_field(window: Mapping[str, str], name: str, spatial_dim: int) -> int:
    return int(window[name].split("x")[spatial_dim]) if name in window else 1


def _products(
    image: int, kernel: int, result: int, stride: int, image_dilation: int, kernel_dilation: int, pad: int
) -> int:
    """The number of pairs of a result and a kernel element that meet an image element, along one dimension.

    Result `r` and kernel element `k` meet at `r * stride + k * kernel_dilation - pad`. An image element is there if
    that is a multiple of `image_dilation`, and within the image.
    """
    # For a fixed `k`, r * stride + offset is a multiple of image_dilation for one r in every `period`, or for no r.
    common = math.gcd(stride, image_dilation) if image_dilation > 1 else 1
    period = image_dilation // common if image_dilation > 1 else 1
    last = (image - 1) * image_dilation
    total = 0
    for element in range(kernel):
        offset = element * kernel_dilation - pad
        if offset % common:
            continue
        # Count the results from `low` to `high` that are `first` modulo `period`.
        first = (-offset // common) * pow(stride // common, -1, period) % period if period > 1 else 0
        low, high = max(0, -(offset // stride)), min(result - 1, (last - offset) // stride)
        low += (first - low) % period
        total += max(0, (high - low) // period + 1)
    return total
