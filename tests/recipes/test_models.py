"""The recipes' networks: published parameter counts (on the meta device), shapes, gradients, clear errors."""

import importlib
import sys
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from retime.recipes import models
from retime.recipes.models import parameter_count, parameters_per_layer

Builder = Callable[..., nn.Module]


def on_meta(build: Builder) -> nn.Module:
    with torch.device("meta"):
        return build()


COUNTS = [
    ("alexnet", {}, 61_100_840),
    ("vgg", {"depth": 11}, 132_863_336),
    ("vgg", {"depth": 13}, 133_047_848),
    ("vgg", {"depth": 16}, 138_357_544),
    ("vgg", {"depth": 19}, 143_667_240),
    ("vgg", {"depth": 11, "batch_norm": True}, 132_868_840),
    ("vgg", {"depth": 19, "batch_norm": True}, 143_678_248),
    ("densenet", {"depth": 121}, 7_978_856),
    ("densenet", {"depth": 169}, 14_149_480),
    ("densenet", {"depth": 201}, 20_013_928),
    ("densenet", {"depth": 161}, 28_681_000),
    # DenseNet-BC (k=12, 100 layers, CIFAR-10): "0.8M" in the paper's table 2.
    ("densenet", {"growth": 12, "num_classes": 10, "small_images": True, "blocks": (16, 16, 16)}, 769_162),
    ("googlenet", {}, 6_624_904),
    # The paper's own form: the sum over its table 1's sizes, with biases.
    ("googlenet", {"batch_norm": False, "kernel": 5}, 6_998_552),
    ("mobilenet_v3", {"variant": "large"}, 5_483_032),
    ("mobilenet_v3", {"variant": "small"}, 2_542_856),
    ("lenet5", {}, 61_706),
    ("mlp", {}, 24 * (1024 * 1024 + 1024)),
    ("residual_mlp", {}, 12 * (1024 * 1024 + 3 * 1024) + (64 + 1) * 1024 + (1024 + 1) * 10),
    # transformers' MobileNetV2 and ResNet have torchvision's counts: same layers, same biases.
    ("mobilenet_v2", {}, 3_504_872),
    ("resnet", {"depth": 18}, 11_689_512),
    ("resnet", {"depth": 34}, 21_797_672),
    ("resnet", {"depth": 50}, 25_557_032),
    ("resnet", {"depth": 101}, 44_549_160),
    ("resnet", {"depth": 152}, 60_192_808),
    # 109 482 240 in the encoder and pooler, and a 768x2 classifier.
    ("bert", {}, 109_482_240 + 768 * 2 + 2),
    ("gpt2", {"size": "small"}, 124_439_808),
    ("gpt2", {"size": "medium"}, 354_823_168),
    ("gpt2", {"size": "large"}, 774_030_080),
    ("llama", {"size": "1b"}, 1_100_048_384),
    ("llama", {"size": "7b"}, 6_738_415_616),
]
FROM_TRANSFORMERS = {"mobilenet_v2", "resnet", "bert", "gpt2", "llama"}


@pytest.mark.parametrize(("name", "options", "count"), COUNTS)
def test_parameter_counts_are_the_published_ones(name: str, options: dict[str, object], count: int) -> None:
    if name in FROM_TRANSFORMERS:
        pytest.importorskip("transformers")
    assert parameter_count(on_meta(partial(getattr(models, name), **options))) == count


def test_transformer_base_counts_what_the_paper_describes() -> None:
    features, hidden, vocabulary = 512, 2048, 37_000
    attention = 4 * (features * features + features)
    feed_forward = 2 * features * hidden + hidden + features
    norm = 2 * features
    encoder_layer = attention + feed_forward + 2 * norm
    decoder_layer = 2 * attention + feed_forward + 3 * norm
    expected = 6 * (encoder_layer + decoder_layer) + vocabulary * features  # one matrix embeds and scores
    assert parameter_count(on_meta(models.transformer_base)) == expected == 63_082_496  # "65" million in table 3


@pytest.mark.parametrize("variant", ["32s", "16s", "8s"])
def test_fcn_counts_what_the_paper_describes(variant: str) -> None:
    classes = 21
    convolutions = parameter_count(on_meta(partial(models.vgg, depth=16))) - (25088 + 1) * 4096 - 4097 * (4096 + 1000)
    fully = (7 * 7 * 512 + 1) * 4096 + 4097 * 4096
    scores = {"32s": [4096], "16s": [4096, 512], "8s": [4096, 512, 256]}[variant]
    windows = {"32s": [64], "16s": [4, 32], "8s": [4, 4, 16]}[variant]
    upsampling = sum(window * window * classes * classes for window in windows)
    expected = convolutions + fully + sum((size + 1) * classes for size in scores) + upsampling
    assert parameter_count(on_meta(partial(models.fcn, variant=variant))) == expected


def test_vgg_has_98_convolutions_and_three_linear_layers_or_as_many_a_stage_as_is_said() -> None:
    kinds = [type(module) for module in on_meta(partial(models.vgg, depth=101)).modules()]
    assert (kinds.count(nn.Conv2d), kinds.count(nn.Linear)) == (98, 3)
    by_stages = on_meta(partial(models.vgg, depth=[1, 1, 2, 2, 2]))
    assert str(by_stages) == str(on_meta(partial(models.vgg, depth=11)))


IMAGES = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
TOKENS = torch.randint(1, 64, (2, 12), generator=torch.Generator().manual_seed(0))
IMAGE_MODELS: list[tuple[str, dict[str, object]]] = [
    ("alexnet", {"width": 0.125, "image_size": 64}),
    ("vgg", {"depth": 11, "width": 0.125, "image_size": 64}),
    ("vgg", {"depth": 19, "batch_norm": True, "width": 0.125, "hidden": 0, "image_size": 64}),
    ("densenet", {"growth": 4, "blocks": (2, 2, 2, 2)}),
    ("densenet", {"growth": 4, "blocks": (1, 1), "small_images": True}),
    ("googlenet", {"width": 0.125}),
    ("googlenet", {"width": 0.125, "batch_norm": False, "kernel": 5}),
    ("mobilenet_v3", {"variant": "large", "width": 0.25}),
    ("mobilenet_v3", {"variant": "small", "width": 0.25}),
    ("mobilenet_v2", {"width": 0.25}),
    ("resnet", {"depth": 18, "width": 0.125}),
    ("resnet", {"depth": 50, "width": 0.125}),
]


TOKEN_MODELS: list[tuple[str, dict[str, object], tuple[int, ...]]] = [
    ("bert", {"size": "tiny", "num_classes": 3}, (2, 3)),
    ("bert", {"size": "tiny", "head": "masked_lm", "layers": 1}, (2, 12, 64)),
    ("gpt2", {"size": "tiny"}, (2, 12, 64)),
    ("gpt2", {"size": "tiny", "tied": False}, (2, 12, 64)),
    ("llama", {"size": "tiny", "layers": 1}, (2, 12, 64)),
]


def check_trains(model: nn.Module, inputs: Tensor, shape: tuple[int, ...]) -> None:
    """Logits have the shape, and every parameter gets a finite gradient that is not all zero somewhere in the model."""
    logits = model(inputs)
    assert logits.shape == shape
    assert logits.dtype == torch.float32
    logits.square().mean().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
    assert any(parameter.grad.abs().sum() > 0 for parameter in model.parameters() if parameter.grad is not None)


TRAINED: list[tuple[str, dict[str, object], Tensor, tuple[int, ...]]] = [
    *((name, {"num_classes": 7, **options}, IMAGES, (2, 7)) for name, options in IMAGE_MODELS),
    *(("lenet5", {"in_channels": 3, "classic": classic}, IMAGES[:, :, :32, :32], (2, 10)) for classic in (False, True)),
    *(
        ("fcn", {"variant": variant, "num_classes": 5, "width": 1 / 64}, IMAGES[..., :32], (2, 5, 64, 32))
        for variant in ("32s", "16s", "8s")
    ),
    *((name, {"vocab_size": 64, "max_tokens": 16, **options}, TOKENS, shape) for name, options, shape in TOKEN_MODELS),
    (
        "recurrent_tagger",
        {"vocab_size": 64, "hidden_size": 8, "num_classes": 3, "bidirectional": True},
        TOKENS,
        (2, 12, 3),
    ),
]


@pytest.mark.parametrize(("name", "options", "inputs", "shape"), TRAINED)
def test_networks_map_a_batch_to_what_they_score_and_train(
    name: str, options: dict[str, object], inputs: Tensor, shape: tuple[int, ...]
) -> None:
    if name in FROM_TRANSFORMERS:
        pytest.importorskip("transformers")
    torch.manual_seed(0)
    check_trains(getattr(models, name)(**options), inputs, shape)


def test_unet_scores_every_pixel() -> None:
    model = models.unet(num_classes=5, in_channels=3, depth=2, width=1 / 8)
    check_trains(model, IMAGES[..., :32], (2, 5, 64, 32))
    assert [stage[0].out_channels for stage in model.down] == [8, 16, 32]
    with pytest.raises(ValueError, match="depth=0"):
        models.unet(depth=0)


def test_fcn_upsampling_starts_as_bilinear_interpolation() -> None:
    from retime.recipes.models.fcn import bilinear_upsampling

    image = torch.randn(1, 3, 8, 8)
    ours = bilinear_upsampling(3, 4)(image)
    reference = nn.functional.interpolate(image, scale_factor=4, mode="bilinear", align_corners=False)
    # Away from the border: there, a transposed convolution adds zeros where interpolation repeats the edge.
    torch.testing.assert_close(ours[..., 4:-4, 4:-4], reference[..., 4:-4, 4:-4])


def test_mlp_and_convolutions_are_depth_times_a_layer() -> None:
    model = models.mlp(depth=3, width=16)
    assert [type(module) for module in model] == [nn.Linear, nn.ReLU] * 3
    check_trains(model, torch.randn(4, 16), (4, 16))
    check_trains(models.mlp(depth=2, width=16, in_features=64, num_classes=10), torch.randn(4, 64), (4, 10))
    convolutions = models.convolutions(depth=3, channels=4)
    check_trains(convolutions, torch.randn(2, 4, 5, 5), (2, 4, 5, 5))
    assert parameter_count(convolutions) == 3 * (4 * 4 * 9 + 4)


@pytest.mark.parametrize(("name", "layers", "key"), [("bert", 48, "encoder.layer."), ("gpt2", 3, "transformer.h.")])
def test_layers_replaces_the_depth_of_a_size(name: str, layers: int, key: str) -> None:
    pytest.importorskip("transformers")
    model = on_meta(partial(getattr(models, name), size="tiny", layers=layers, vocab_size=64))
    blocks = {parameter.split(key)[1].split(".")[0] for parameter, _ in model.named_parameters() if key in parameter}
    assert len(blocks) == layers


def test_gpt2_with_linear_layers_is_the_same_function() -> None:
    pytest.importorskip("transformers")
    tokens = torch.arange(8).view(1, 8)
    outputs = []
    for linear in (False, True):
        torch.manual_seed(0)
        model = models.gpt2("tiny", vocab_size=16, dropout=0.0, linear=linear)
        kinds = {type(module).__name__ for module in model.modules()}
        assert ("Conv1D" in kinds) is not linear
        outputs.append(model(tokens))
    torch.testing.assert_close(*outputs)


def test_untied_gpt2_has_an_output_matrix_of_its_own() -> None:
    pytest.importorskip("transformers")
    tied, untied = (on_meta(partial(models.gpt2, "tiny", vocab_size=64, tied=tied)) for tied in (True, False))
    assert parameter_count(untied) - parameter_count(tied) == 64 * 128


def test_transformer_base_takes_a_pair_in_one_tensor_and_looks_at_no_later_target() -> None:
    torch.manual_seed(0)
    model = models.transformer_base(vocab_size=50, width=1 / 8, layers=2, heads=2, dropout=0.0, max_tokens=9)
    pair = torch.randint(50, (2, 2, 9))
    logits = model(pair)
    torch.testing.assert_close(model(pair[:, 0], pair[:, 1]), logits)
    changed = pair.clone()
    changed[:, 1, 5:] = (changed[:, 1, 5:] + 1) % 50
    torch.testing.assert_close(model(changed)[:, :5], logits[:, :5])
    assert not torch.allclose(model(changed)[:, 5:], logits[:, 5:])
    check_trains(model, pair, (2, 9, 50))


def test_networks_from_transformers_evaluate_on_running_statistics() -> None:
    pytest.importorskip("transformers")
    norms = [m for m in on_meta(models.mobilenet_v2).modules() if isinstance(m, nn.BatchNorm2d)]
    assert norms
    assert {norm.momentum for norm in norms} == {0.1}


def test_parameters_per_layer_counts_modules_that_hold_parameters() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Sequential(nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4)))
    assert parameters_per_layer(model) == (16 + 16 + 8) / 3
    tied = nn.Sequential(nn.Embedding(5, 2), nn.Linear(2, 5, bias=False))
    tied[1].weight = tied[0].weight
    assert parameter_count(tied) == 10
    assert parameters_per_layer(tied) == 10
    with pytest.raises(ValueError, match="ReLU has no parameters"):
        parameters_per_layer(nn.ReLU())


def test_parameters_per_layer_orders_networks_as_figure_6_does() -> None:
    pytest.importorskip("transformers")
    builders = [models.mobilenet_v2, partial(models.resnet, 18), partial(models.vgg, 19, batch_norm=True)]
    averages = [parameters_per_layer(on_meta(build)) for build in builders]
    assert averages == sorted(averages)
    assert averages[-1] > 100 * averages[0]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (partial(models.vgg, 12), "depth=12 is unknown: choose one of 11, 13"),
        (partial(models.vgg, (1, 2)), r"depth=\(1, 2\)"),
        (partial(models.vgg, image_size=16), "32 or more"),
        (partial(models.alexnet, image_size=32), "63 or more"),
        (partial(models.densenet, 120), "depth=120"),
        (partial(models.mobilenet_v3, "medium"), "variant='medium'"),
        (partial(models.mobilenet_v3, width=0), "width=0 must be positive"),
        (partial(models.fcn, "4s"), "variant='4s'"),
        (partial(models.googlenet, kernel=4), "kernel=4"),
        (partial(models.mlp, depth=0), "depth=0"),
        (partial(models.convolutions, depth=0), "depth=0"),
        (partial(models.resnet, 20), "depth=20"),
        (partial(models.bert, "huge"), "size='huge'"),
        (partial(models.bert, head="span"), "head='span'"),
        (partial(models.gpt2, layers=0), "layers=0"),
        (partial(models.transformer_base, width=0.1), "D=51"),
    ],
)
def test_bad_arguments_are_refused_with_what_to_choose(build: Builder, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


def test_inputs_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="multiples of 32"):
        models.fcn(width=1 / 64)(torch.zeros(1, 3, 40, 64))
    model = models.transformer_base(vocab_size=8, width=1 / 8, layers=1, max_tokens=4)
    with pytest.raises(ValueError, match=r"\(B, 2, T\)"):
        model(torch.zeros(1, 4, dtype=torch.long))
    with pytest.raises(ValueError, match="max_tokens=4"):
        model(torch.zeros(1, 2, 5, dtype=torch.long))


def test_transformers_is_imported_only_when_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The models load anew, and find none."""
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setattr("retime.recipes.models", models)  # put back behind the test
    for name in [name for name in sys.modules if name.startswith(models.__name__)]:
        monkeypatch.delitem(sys.modules, name)
    anew = importlib.import_module(models.__name__)
    assert anew is not models
    anew.lenet5()
    with pytest.raises(ImportError, match=r"lightning-retime\[recipes\]"):
        anew.resnet(18)
