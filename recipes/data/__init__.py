"""Data for the recipes: real data that needs no download, loaders for a user's own copies, and synthetic stand-ins.

Nothing here downloads anything. Every function returns a ``torch.utils.data.Dataset`` of ``(input, target)`` tensors
that has a ``name``, ``num_classes`` and ``is_synthetic``. Everything is deterministic by ``seed``; ``split`` is
``"train"`` or ``"val"``.

====================  =============================  ==============================================
real, bundled         real, from the user's path     synthetic, of the same shape
====================  =============================  ==============================================
digits                cifar10, cifar100              synthetic_images
digit_masks           ..                             .. (segmentation)
..                    image_folder (ImageNet)        synthetic_images
python_source         ..                             synthetic_tokens
..                    ..                             synthetic_translation (WMT)
..                    irmas                          synthetic_irmas
..                    ..                             bitstreams (BPPSA's own synthetic task)
..                    ..                             synthetic_vectors, synthetic_maps (for timing)
====================  =============================  ==============================================
"""

from retime.recipes.data.audio import irmas
from retime.recipes.data.base import ArrayData
from retime.recipes.data.bundled import digit_masks, digits, next_byte, python_source
from retime.recipes.data.cifar import cifar10, cifar100
from retime.recipes.data.images import image_folder
from retime.recipes.data.synthetic import (
    bitstreams,
    synthetic_images,
    synthetic_irmas,
    synthetic_maps,
    synthetic_tokens,
    synthetic_translation,
    synthetic_vectors,
)
