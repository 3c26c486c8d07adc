"""What the BPPSA paper (Wang, Bai and Pekhimenko 2020) states in numbers about convolutional networks."""

from functools import partial

from retime.recipes.core.claims import Claim

PAPER = "bppsa"
TABLE_1 = "Table 1"
_claim = partial(Claim, PAPER)

SPARSITY = {
    "convolution": _claim(TABLE_1, "ppm", 8430, "places that are no guaranteed zeros, first convolution of VGG-11"),
    "relu": _claim(TABLE_1, "ppm", 20, "places that are no guaranteed zeros, first ReLU of VGG-11"),
    "max_pool": _claim(TABLE_1, "ppm", 60, "places that are no guaranteed zeros, first max-pooling of VGG-11"),
}
GENERATION = {
    "convolution": _claim(TABLE_1, "x", 8.3e3, "generation, convolution, over autograd by columns"),
    "relu": _claim(TABLE_1, "x", 1.2e6, "generation, ReLU, over autograd by columns"),
    "max_pool": _claim(TABLE_1, "x", 1.5e5, "generation, max-pooling, over autograd by columns"),
}
DENSE_MIB = _claim("section 3.3", "MiB", 768, "the convolution's Jacobian as a full float32 matrix")
CSR_MIB = _claim("section 3.3", "MiB", 6.5, "its values in CSR form")
PRUNED_SHARE = _claim("section 4.3", "%", 97, "weights pruned away (given)")
