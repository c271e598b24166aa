"""A Cache in whatever surrounds it ends as the table says, and the page says the same."""

from __future__ import annotations

import gc
import sys
import threading

import pytest
import torch
from transformers import DynamicCache

import kvlab
from cache import surroundings
from kvlab import Cache
from kvlab.base.errors import CapabilityError
from kvlab.codec import apart, rotation
from kvlab.codec.base import Site
from kvlab.codec.registry import build
