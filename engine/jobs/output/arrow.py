"""Import pyarrow; MissingPackage if it is not installed."""

try:
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq
except ImportError:
    from weftline.errors import MissingPackage

    raise MissingPackage("pyarrow", "batch") from None

__all__ = ["pa", "pc", "pq"]
