"""What moDNN (Chen et al. 2018) states, and what this project wants of a byte budget: as in `claims.yaml`."""

from functools import partial

from retime.recipes.core.claims import claim_of, target_of

claim = partial(claim_of, "modnn")
target = partial(target_of, "modnn")
