"""The papers' networks, each as one builder function that returns an ``nn.Module``.

Every model takes **one tensor** (images ``(B, C, H, W)`` float, or token ids ``(B, T)`` int64) and returns its logits,
so any recipe can train any of them with one loss function. Networks for which transformers has a configuration are
built from it, with random weights (`hub`); the others are written out here. transformers is imported only when one of
its networks is built. Nothing is downloaded.

===============  ================================================  ================================================
module           builders                                          papers
===============  ================================================  ================================================
`hub`            mobilenet_v2, resnet, bert, gpt2, llama           optimizer-fusion, ooo-backprop, modnn
`chains`         mlp, residual_mlp, convolutions, lenet5,          optimizer-fusion, modnn, cpu-accumulation, bppsa
                 alexnet, vgg
`fcn`            fcn                                               modnn
`densenet`       densenet                                          ooo-backprop
`mobilenet`      mobilenet_v3                                      ooo-backprop
`googlenet`      googlenet                                         cpu-accumulation
`translation`    transformer_base                                  optimizer-fusion
`recurrent`      recurrent_classifier, recurrent_tagger            bppsa
`unet`           unet                                              none of these: what people segment images with
===============  ================================================  ================================================

In a Hydra config: ``model: {_target_: retime.recipes.models.vgg, depth: 19, batch_norm: true}``.
"""

from retime.recipes.models.chains import alexnet, convolutions, lenet5, mlp, residual_mlp, vgg
from retime.recipes.models.common import parameter_count, parameters_per_layer
from retime.recipes.models.densenet import densenet
from retime.recipes.models.fcn import fcn
from retime.recipes.models.googlenet import googlenet
from retime.recipes.models.hub import bert, gpt2, llama, mobilenet_v2, resnet
from retime.recipes.models.mobilenet import mobilenet_v3
from retime.recipes.models.recurrent import recurrent_classifier, recurrent_tagger
from retime.recipes.models.translation import transformer_base
from retime.recipes.models.unet import unet
