"""Kinds of Arrow types, and the casts between types that keep every value."""

from __future__ import annotations

import pyarrow as pa


def storage(type: pa.DataType) -> pa.DataType:
    """Return the storage type of extension types, any other type unchanged."""
    while isinstance(type, pa.BaseExtensionType):
        type = type.storage_type
    return type


def is_text(type: pa.DataType) -> bool:
    return bool(pa.types.is_string(type) or pa.types.is_large_string(type) or pa.types.is_string_view(type))


def is_bytes(type: pa.DataType) -> bool:
    fixed = pa.types.is_fixed_size_binary(type) or pa.types.is_binary_view(type)
    return bool(fixed or pa.types.is_binary(type) or pa.types.is_large_binary(type))


def is_list(type: pa.DataType) -> bool:
    return bool(pa.types.is_list(type) or pa.types.is_large_list(type) or pa.types.is_fixed_size_list(type))


def innermost(type: pa.DataType) -> pa.DataType:
    """Return the storage type of the values in nested lists; for any other type, its own."""
    type = storage(type)
    while is_list(type):
        type = storage(type.value_type)
    return type


def is_number(type: pa.DataType) -> bool:
    return bool(pa.types.is_integer(type) or pa.types.is_floating(type) or pa.types.is_boolean(type))


def may_hold(wanted: pa.DataType, found: pa.DataType) -> bool:
    """Return False if Arrow casts a type to another by changing values: numbers to text, or objects to fewer keys."""
    is_, both = pa.types, (wanted, found)
    if is_.is_null(found) or any(isinstance(one, pa.BaseExtensionType) for one in both):
        return True
    if is_.is_dictionary(found):
        return may_hold(wanted, found.value_type)
    if is_.is_struct(wanted) and is_.is_struct(found):
        fields = {one.name: one.type for one in wanted}
        return all(one.name in fields and may_hold(fields[one.name], one.type) for one in found)
    if is_list(wanted) and is_list(found):
        return may_hold(wanted.value_type, found.value_type)
    if is_.is_map(wanted) and is_.is_map(found):
        return may_hold(wanted.key_type, found.key_type) and may_hold(wanted.item_type, found.item_type)
    if is_.is_floating(wanted) and is_.is_floating(found):
        return bool(wanted.bit_width >= found.bit_width)
    number = is_.is_integer(wanted) or is_.is_floating(wanted)
    return (number and is_.is_integer(found)) or any(all(map(kind, both)) for kind in _KINDS)


_KINDS = (
    is_text, is_bytes, pa.types.is_boolean, pa.types.is_decimal, pa.types.is_timestamp, pa.types.is_date,
    pa.types.is_time, pa.types.is_duration,
)  # fmt: skip
"""Kinds of types whose values Arrow casts exactly, or not at all."""
