import pytest

# A machine that is lent for its GPU may lack some of these.
for _name in ("pydantic", "orjson", "ml_dtypes", "prometheus_client", "cryptography"):
    pytest.importorskip(_name, reason=f"needs {_name}, which Ingot depends on: pip install '.[gpu]'")
