from __future__ import annotations

import hashlib
import os
import subprocess
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

from ingot.errors import InvalidArgument, NotFound
from ingot.model_store.trust.keys import MAX_KEY_BYTES, PrivateKey, PublicKey, read_file
from tests.model_store.signers import KEY, OTHER
from tests.support import RequireTool

CERTIFICATE = b"-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n"


def none() -> str:
    return ""


def private_pem(key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey | ed25519.Ed25519PrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def public_pem(key: ec.EllipticCurvePublicKey | rsa.RSAPublicKey | ed25519.Ed25519PublicKey) -> bytes:
    return key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


K1 = ec.generate_private_key(ec.SECP256K1())
RSA = rsa.generate_private_key(65537, 2048)
ED25519 = ed25519.Ed25519PrivateKey.generate()


class TestPrivateKey:
    @pytest.mark.parametrize("password", ["", "correct horse", "\u00fcml\u00e4ut"])
    def test_a_written_key_can_be_read(self, password: str) -> None:
        read = PrivateKey.parse(KEY.pem(password), "k", lambda: password)
        assert read.public.keyid == KEY.public.keyid
        assert KEY.public.verify(read.sign(b"message"), b"message")

    def test_a_password_is_requested_only_for_an_encrypted_key(self) -> None:
        def asked() -> str:
            raise AssertionError

        PrivateKey.parse(KEY.pem(), "k", asked)

    def test_a_wrong_password(self) -> None:
        with pytest.raises(InvalidArgument, match=r"k\.key cannot be decrypted: the password is wrong"):
            PrivateKey.parse(KEY.pem("right"), "k.key", lambda: "wrong")

    def test_a_missing_password(self) -> None:
        with pytest.raises(InvalidArgument, match=r"k\.key is encrypted; set INGOT_KEY_PASSWORD"):
            PrivateKey.parse(KEY.pem("right"), "k.key", none)

    @pytest.mark.parametrize(
        ("pem", "message"),
        [
            (KEY.public.pem, "is a public key, not a private key in PEM"),
            (CERTIFICATE, "is a certificate, not a private key in PEM"),
            (private_pem(RSA), "another kind than ECDSA on P-256, P-384 or P-521"),
            (private_pem(K1), "another kind than ECDSA on P-256, P-384 or P-521"),
            (private_pem(ED25519), "another kind than ECDSA on P-256, P-384 or P-521"),
            (b"", "is not a PEM file"),
            (b"\x00\xff\x1b[31m", "is not a PEM file"),
            (KEY.pem()[:100], "is a private key, not a private key in PEM"),
        ],
        ids=["public", "certificate", "rsa", "k1", "ed25519", "empty", "binary", "truncated"],
    )
    def test_a_file_of_another_kind_is_refused(self, pem: bytes, message: str) -> None:
        with pytest.raises(InvalidArgument, match=f"^here .*{message}"):
            PrivateKey.parse(pem, "here", none)

    @pytest.mark.parametrize("curve", [ec.SECP384R1(), ec.SECP521R1()], ids=lambda curve: str(curve.name))
    def test_larger_curves_sign_with_the_hash_of_their_strength(self, curve: ec.EllipticCurve) -> None:
        made = ec.generate_private_key(curve)
        key = PrivateKey.parse(private_pem(made), "k", none)
        signature = key.sign(b"message")
        hash_of = {"secp384r1": hashes.SHA384(), "secp521r1": hashes.SHA512()}[curve.name]
        made.public_key().verify(signature, b"message", ec.ECDSA(hash_of))
        assert PublicKey.parse(key.public.pem, "k").verify(signature, b"message")
        assert not key.public.verify(signature, b"another")

    def test_signatures_are_deterministic(self) -> None:
        assert KEY.sign(b"message") == KEY.sign(b"message")

    @pytest.mark.parametrize("kind", ["pkcs8", "ec"])
    def test_keys_of_openssl_are_taken(self, kind: str, require_tool: RequireTool, tmp_path: Path) -> None:
        openssl, path = require_tool("openssl"), tmp_path / "key.pem"
        command = {
            "pkcs8": ["genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256"],
            "ec": ["ecparam", "-name", "prime256v1", "-genkey", "-noout"],
        }[kind]
        subprocess.run([openssl, *command, "-out", path], check=True, capture_output=True)
        key = PrivateKey.parse(path.read_bytes(), "k", none)
        assert key.public.verify(key.sign(b"message"), b"message")


class TestPublicKey:
    def test_only_its_own_signatures_hold(self) -> None:
        signature = KEY.sign(b"message")
        assert KEY.public.verify(signature, b"message")
        assert not KEY.public.verify(signature, b"another")
        assert not OTHER.public.verify(signature, b"message")
        assert not KEY.public.verify(b"", b"message")
        assert not KEY.public.verify(b"\x30\x06\x02\x01\x00\x02\x01\x00", b"message")

    def test_its_id_is_the_digest_of_its_der(self, require_tool: RequireTool) -> None:
        command = [require_tool("openssl"), "pkey", "-pubin", "-outform", "DER"]
        der = subprocess.run(command, input=KEY.public.pem, check=True, capture_output=True).stdout
        assert KEY.public.keyid == hashlib.sha256(der).hexdigest()

    @pytest.mark.parametrize(
        ("pem", "message"),
        [
            (KEY.pem(), "is a private key, not a public key in PEM"),
            (KEY.pem("secret"), "is a private key, not a public key in PEM"),
            (CERTIFICATE, "is a certificate, not a public key in PEM"),
            (public_pem(RSA.public_key()), "another kind than ECDSA on P-256, P-384 or P-521"),
            (public_pem(K1.public_key()), "another kind than ECDSA on P-256, P-384 or P-521"),
            (public_pem(ED25519.public_key()), "another kind than ECDSA on P-256, P-384 or P-521"),
            (b"ssh-ed25519 AAAA", "is not a PEM file"),
        ],
        ids=["private", "encrypted", "certificate", "rsa", "k1", "ed25519", "ssh"],
    )
    def test_a_file_of_another_kind_is_refused(self, pem: bytes, message: str) -> None:
        with pytest.raises(InvalidArgument, match=f"^here .*{message}"):
            PublicKey.parse(pem, "here")


class TestReadFile:
    def test_other_than_a_small_file_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(NotFound, match="there is no file"):
            read_file(tmp_path / "missing")
        with pytest.raises(InvalidArgument, match="is not a file"):
            read_file(tmp_path)
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(InvalidArgument, match="is not a file"):
            read_file(tmp_path / "pipe")
        (tmp_path / "large").write_bytes(bytes(MAX_KEY_BYTES + 1))
        with pytest.raises(InvalidArgument, match="has over 64 KiB"):
            read_file(tmp_path / "large")
        with pytest.raises(InvalidArgument, match="cannot be read"):
            read_file(Path("a\0b"))

    def test_world_writable_files_are_not_trusted(self, tmp_path: Path) -> None:
        (tmp_path / "f").write_bytes(b"content")
        (tmp_path / "f").chmod(0o666)
        assert read_file(tmp_path / "f") == b"content"
        with pytest.raises(InvalidArgument, match="can be changed by every user of this machine; chmod o-w"):
            read_file(tmp_path / "f", trusted=True)
