"""pyarrow, which every table of a job is made of: imported here, so that a missing one is said in one place."""

try:
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq
except ImportError:
    from weftline.errors import MissingPackage

    raise MissingPackage("pyarrow", "batch") from None

__all__ = ["pa", "pc", "pq"]
