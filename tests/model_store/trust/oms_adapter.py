"""The adapter between the conformance suite of OpenSSF Model Signing and Ingot; see test_oms_conformance.py."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ingot.errors import IngotError, Unsupported
from ingot.model_store.trust import oms
from ingot.model_store.trust.keys import PrivateKey, PublicKey


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=("sign-model", "verify-model"))
    for name in ("--method", "--model-path"):
        parser.add_argument(name, required=True)
    for name in ("--output-bundle", "--bundle", "--private-key", "--public-key"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--ignore-paths", action="append", default=[])
    parser.add_argument("--ignore-unsigned-files", action="store_true")
    asked, _ = parser.parse_known_args()  # those of other methods are left over
    try:
        run(asked)
    except IngotError as error:
        sys.exit(f"error: {error}")


def run(asked: argparse.Namespace) -> None:
    if asked.method != "key":
        raise Unsupported(f"the method '{asked.method}' is not supported; use a key")
    model = Path(asked.model_path)
    if asked.command == "sign-model":
        key = PrivateKey.parse(asked.private_key.read_bytes(), str(asked.private_key), str)
        asked.output_bundle.write_bytes(oms.sign(model, key, out=asked.output_bundle, ignored=asked.ignore_paths))
        return
    public = PublicKey.parse(asked.public_key.read_bytes(), str(asked.public_key))
    keys, lenient = {public.keyid: public}, asked.ignore_unsigned_files
    oms.verify(model, asked.bundle, keys, ignored=asked.ignore_paths, allow_unsigned=lenient)


if __name__ == "__main__":
    main()
