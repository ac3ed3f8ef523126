"""What the zygote of functions imports, so that a function's own imports find it done: the imports of this module.

Chosen by measurement: what the first lines of functions import; what else is a setting, by default the modules of
`transformers` that every model needs. A model's own module (``transformers.models.bert``) takes 5 to 50 ms and is left
to the instance that wants it. How they are imported is core/sandbox/preload.py's business.
"""

# ruff: noqa: F401
import copy
import dataclasses
import functools
import json
import math

import numpy
import orjson
import torch
import torch.nn.functional
import torch.nn.utils.parametrize

from dormouse.client_shim.instance import runner
from dormouse.client_shim.torch_face import install
