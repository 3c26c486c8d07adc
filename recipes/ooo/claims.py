"""What the out-of-order backprop paper (Oh et al. 2022) states in numbers about data-parallel training."""

from functools import partial

from retime.recipes.core.claims import Claim

PAPER = "ooo-backprop"
_claim = partial(Claim, PAPER)

FIGURE_4 = "section 5.1, Figure 4"
FIGURE_4_PRIORITISED = _claim(FIGURE_4, "units", 1, "saved by (b), prioritised communication, over (a)")
FIGURE_4_REVERSED = _claim(FIGURE_4, "units", 3, "saved by (c), reverse first-k, over (b)")
FIGURE_4_OVER_A = _claim(FIGURE_4, "x", 1.16, "speed of (c) over (a)")
FIGURE_4_OVER_B = _claim(FIGURE_4, "x", 1.12, "speed of (c) over (b)")
FIGURE_4_OTHER_OPTIMUM = _claim(FIGURE_4, "k", 4, "largest k that is as fast as k = 3, at least")

DISCUSSION = "section 8.3, Discussion"
COMPUTE_MS = _claim(DISCUSSION, "ms", 380, "computation of a step (given to the simulator)")
OVERHEAD_MS = _claim(DISCUSSION, "ms", 350, "communication overhead of BytePS (given to the simulator)")
DEFERRED_MS = _claim(DISCUSSION, "ms", 85, "W2 to W45, behind which S1 hides")
FURTHER_MS = _claim(DISCUSSION, "ms", 65, "more overlap of S2 to S20")
REMAINING_MS = _claim(DISCUSSION, "ms", 200, "communication overhead of reverse first-k, k = 45")
SPEEDUP = _claim(DISCUSSION, "x", 1.27, "speed of reverse first-k, k = 45, over BytePS")

FIGURE_10 = "section 8.3, Figure 10"
# (cluster, network, GPUs) -> the speedup over BytePS that the text gives; "up to" where GPUs is None
SCALING = {
    ("Priv-A", "ResNet-101", 8): _claim(FIGURE_10, "x", 1.153, "8 x Titan XP, ResNet-101, over BytePS"),
    ("Priv-B", "ResNet-101", 20): _claim(FIGURE_10, "x", 1.271, "20 x P100, ResNet-101, over BytePS"),
    ("Pub-A", "ResNet-50", 16): _claim(FIGURE_10, "x", 1.265, "16 x V100, ResNet-50, over BytePS"),
    ("Pub-A", "ResNet-101", 8): _claim(FIGURE_10, "x", 1.198, "8 x V100, ResNet-101, over BytePS"),
}
SMALL_NETWORKS = {
    "DenseNet": _claim(FIGURE_10, "x", 1.10, "DenseNet, over BytePS, up to"),
    "MobileNet": _claim(FIGURE_10, "x", 1.053, "MobileNet, over BytePS, up to"),
}

# Measured by others: how well the roofline of `ooo_model_costs` does on a GPU and network it was not calibrated on.
TENSORFLOW = "TensorFlow benchmarks, May 2017"
TENSORFLOW_WHERE = "DGX-1 (P100), synthetic data, batch 64"
P100_RESNET_50 = Claim(TENSORFLOW, TENSORFLOW_WHERE, "images/s", 219, "one P100 SXM2, ResNet-50")
P100_RESNET_152 = Claim(TENSORFLOW, TENSORFLOW_WHERE, "images/s", 91.8, "one P100 SXM2, ResNet-152")

FIGURE_7 = (
    _claim("section 8.2, Figure 7", "x", 1.58, "MobileNet 0.25, batch 32, over XLA"),
    _claim("section 8.2, Figure 7", "x", 1.54, "DenseNet-121 k=12, batch 32, over XLA"),
    _claim("section 8.2, Figure 7", "x", 1.06, "ResNet, at most, over XLA"),
)
MULTI_STREAM_ALONE = _claim("section 8.2", "x", 1.15, "multi-stream computation alone, at most (MobileNet 0.25)")
MULTI_STREAM = {
    ("MobileNet V3 (alpha=0.25)", 32): MULTI_STREAM_ALONE,
    ("ResNet-50", 64): _claim("section 8.2", "x", 1.02, "multi-stream computation alone, ResNet-50, batch 64, at most"),
    ("ResNet-101", 64): _claim(
        "section 8.2", "x", 1.02, "multi-stream computation alone, ResNet-101, batch 64, at most"
    ),
}
REORDERED_AT = ("DenseNet-121 (k=12)", 32)  # the text's "DenseNet-121" of 1.54
REORDERED = _claim("section 8.2", "x", round(1.54 / 1.39, 3), "re-ordering over two streams without, DenseNet-121 k=12")

FIGURE_1_RATIO = _claim(
    "section 2, Figure 1", "times", 4, "issue over execution, convolutions of DenseBlock-3 and 4, at most"
)
FIGURE_1_SHARE = _claim("section 2", "%", 66.7, "share of DenseBlock-3 and 4 in the execution")
FIGURE_2_SHORTEST = _claim("section 2", "us", 15, "shortest convolution of DenseBlock-3 and 4")
FIGURE_2_LONGEST = _claim("section 2", "us", 40, "longest convolution of DenseBlock-3 and 4")

FIGURE_8 = "section 8.2, Figure 8"
FIGURE_8_R2 = _claim(FIGURE_8, "x", 1.06, "speed of region R2, the least")
FIGURE_8_R5 = _claim(FIGURE_8, "x", 1.10, "speed of region R5, the most")
FIGURE_8_FULL = _claim(FIGURE_8, "%", 30, "kernels of R2 with as many thread blocks as the device, at least")
FIGURE_8_SETUP = _claim(FIGURE_8, "%", 5, "setting up kernels in R2")
FIGURE_8_THREAD_BLOCKS = _claim(FIGURE_8, "thread blocks", 448, "half of DenseBlock-4's weight gradients")

FIGURE_9 = "section 8.2, Figure 9"
FIGURE_9_MORE = _claim(FIGURE_9, "MB", 200, "most above the conventional execution")
FIGURE_9_PEAK = _claim(FIGURE_9, "MB", 10, "more at the peak")
FIGURE_9_PEAK_SHARE = _claim(FIGURE_9, "%", 0.1, "more at the peak")
