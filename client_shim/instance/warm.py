"""The modules that the zygote of functions imports ahead, so that a function's own imports are fast: this module's
imports.

Chosen by measurement: the imports in the first lines of functions. Further modules are a setting, by default those of
`transformers` that every model needs. A model's own module (``transformers.models.bert``) takes 5 to 50 ms and is
imported by the instance that wants it. core/sandbox/preload.py does the importing.
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
