"""Models that come with dtengine; installed as ``dtengine.models``."""
