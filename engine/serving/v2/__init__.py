"""Open Inference Protocol v2: values, conversion to engine requests, and wire encoding."""
