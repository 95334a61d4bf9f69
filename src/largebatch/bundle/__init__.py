"""A recipe copied into a folder that stands alone: the beginning of somebody's own repository."""

from largebatch.bundle.create import create_bundle
from largebatch.bundle.job import BundledJob

__all__ = ["BundledJob", "create_bundle"]
