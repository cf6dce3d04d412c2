"""A server with a trust policy: the models that it serves or refuses, and its reports."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import onnx
import pytest
from prometheus_client import CollectorRegistry

import ingot
from ingot import Client
from ingot.errors import InvalidArchive, InvalidArgument, Unsupported, Untrusted
from ingot.model_store import Archive, BlobFolder, Store
from ingot.model_store.format import manifest
from ingot.model_store.registry import Registry
from ingot.model_store.trust import cosign, oms, signing
from ingot.model_store.trust.keys import PrivateKey
from ingot.model_store.trust.policy import Policy
from ingot.runtime import EngineSpec, Settings, load_engine
from ingot.runtime.loading import prepacked
from ingot.runtime.loading.prepacked import Prepacked
from ingot.serving import Repository
from tests import onnx_models
from tests.model_store import forgeries, samples
from tests.model_store.signers import KEY, OTHER
from tests.runtime import large_models
from tests.runtime.variants import Made, X, archive

FREE: dict[str, Any] = {"http_port": 0, "grpc_port": 0, "device": "cpu", "choice_time": 0.01}
PLAIN = archive([Made("fp32"), Made("int8", 2)])
CODE = archive([Made("compiled", format="pt2", graph=b"a program")], name="code")


def signed(subject: Archive = PLAIN, key: PrivateKey = KEY) -> Archive:
    return subject.with_signature(signing.sign(subject, subject.name, key))


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    (tmp_path / "team.pub").write_bytes(KEY.public.pem)
    path = tmp_path / "trust.toml"
    path.write_text('[[rule]]\nnames = "**"\nkeys = ["team.pub"]\n')
    return path


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store(tmp_path / "store")
    store.push(signed(), "team/double:1")
    store.push(signed(archive([Made("fp32")])), "team/double:2")
    return store


def tamper(path: Path) -> None:
    path.chmod(0o644)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_signed_models_are_served_and_clients_see_the_signer(store: Store, policy: Path, protocol: str) -> None:
    with ingot.serve("team/double:1", store=store, trust=policy, **FREE) as server:
        with Client(server.http_url if protocol == "http" else server.grpc_url) as client:
            assert client.metadata("double")["properties"]["signed_by"] == KEY.public.keyid
            assert np.allclose(client.infer("double", {"x": X})["y"], 2 * X)
        text = httpx.get(f"{server.http_url}/metrics", trust_env=False).text
        assert 'ingot_signature_checks_total{model="double",result="valid",version="1"} 1.0' in text


@pytest.mark.matrix
def test_without_a_policy_nothing_is_checked(store: Store) -> None:
    with ingot.serve("team/double:1", store=store, **FREE) as server:
        with Client(server.http_url) as client:
            assert "signed_by" not in client.metadata("double")["properties"]
        text = httpx.get(f"{server.http_url}/metrics", trust_env=False).text
        assert 'ingot_signature_checks_total{model="double",result="unchecked",version="1"} 1.0' in text


def test_a_signed_file_is_served_and_an_unsigned_one_is_not(policy: Path, tmp_path: Path) -> None:
    path = tmp_path / "double.ingot"
    signed().save(path)
    with ingot.serve(str(path), trust=policy, **FREE):
        pass
    PLAIN.save(path)
    with pytest.raises(Untrusted, match="it is unsigned"):
        ingot.serve(str(path), trust=policy, **FREE)


@pytest.mark.matrix
def test_a_file_with_a_bundle_of_openssf_model_signing_is_served(policy: Path, tmp_path: Path) -> None:
    path = tmp_path / "double.ingot"
    PLAIN.save(path)
    policy.write_text(f'[[rule]]\nnames = "double"\nkeys = ["{tmp_path / "oms.pub"}"]\nformats = ["oms"]\n')
    (tmp_path / "oms.pub").write_bytes(KEY.public.pem)
    with pytest.raises(Untrusted, match=r"it is unsigned.*formats: oms"):
        ingot.serve(str(path), trust=policy, **FREE)
    oms.beside(path).write_bytes(oms.sign(path, KEY, out=oms.beside(path)))
    with ingot.serve(str(path), trust=policy, **FREE) as server, Client(server.http_url) as client:
        assert client.metadata("double")["properties"]["signed_by"] == KEY.public.keyid
    signed().save(path)
    with pytest.raises(Untrusted, match=r"'double\.ingot' was changed"):
        ingot.serve(str(path), trust=policy, **FREE)


@pytest.mark.matrix
def test_a_model_that_cosign_signed_is_pulled_and_served(policy: Path, registry: str, tmp_path: Path) -> None:
    place, store = Registry(registry), Store(tmp_path / "pulled")
    place.push(PLAIN, "cosign-served/double:1")
    policy.write_text(f'[[rule]]\nnames = "**"\nkeys = ["{tmp_path / "c.pub"}"]\nformats = ["cosign"]\n')
    (tmp_path / "c.pub").write_bytes(KEY.public.pem)
    model = f"{registry}/cosign-served/double:1"
    with pytest.raises(Untrusted, match="it is unsigned"):
        ingot.serve(model, store=store, trust=policy, **FREE)
    found, reference = place.find("cosign-served/double:1")
    place.attach(cosign.sign(found, reference, KEY), "cosign-served/double")
    with ingot.serve(model, store=store, trust=policy, **FREE) as server, Client(server.http_url) as client:
        assert client.metadata("double")["properties"]["signed_by"] == KEY.public.keyid
        assert np.allclose(client.infer("double", {"x": X})["y"], 2 * X)


def test_a_file_does_not_choose_the_rule_that_asks_for_no_signature(policy: Path, tmp_path: Path) -> None:
    policy.write_text('[[rule]]\nnames = "scratch/*"\nrequire_signature = false\n' + policy.read_text())
    path = tmp_path / "double.ingot"
    archive([Made("fp32")], name="scratch/double").save(path)
    for source in (str(path), f"prod={path}"):
        with pytest.raises(Untrusted, match=r"double\.ingot .* it is unsigned"):
            ingot.serve(source, trust=policy, **FREE)
    with pytest.raises(Untrusted, match="it is unsigned"):
        ingot.serve(Archive.open(path), trust=policy, **FREE)
    policy.write_text('[[rule]]\nnames = "double"\nrequire_signature = false\n' + policy.read_text())
    with ingot.serve(str(path), trust=policy, **FREE) as server:
        assert server.models == ["double"]


def test_an_archive_object_is_checked_by_the_policy_too(policy: Path) -> None:
    with ingot.serve(signed(), trust=policy, **FREE):
        pass
    with pytest.raises(Untrusted, match="it is unsigned"):
        ingot.serve(PLAIN, trust=policy, **FREE)


def test_an_untrusted_source_stops_all(store: Store, policy: Path) -> None:
    store.push(signed(CODE, OTHER), "team/code:1")
    with pytest.raises(Untrusted, match="whose key is not accepted"):
        ingot.serve("team/double:1", "team/code:1", store=store, trust=policy, **FREE)


def test_a_signed_model_does_not_pass_for_another(store: Store, policy: Path) -> None:
    store.push(signed(), "team/fraud:1")
    with pytest.raises(Untrusted, match="signed for another name, 'double' and not 'fraud'"):
        ingot.serve("team/fraud:1", store=store, trust=policy, **FREE)
    with pytest.raises(Untrusted, match="signed for another name"):
        ingot.serve("double=team/fraud:1", store=store, trust=policy, **FREE)


def doubled_for_three(path: Path) -> Path:
    """Return the model of a file, but with batches of over two rows, which no golden case has, doubled."""
    model = onnx.load(path)
    model.graph.node[-1].output[0] = "honest"
    model.graph.node.extend(
        [
            onnx.helper.make_node("Shape", ["x"], ["rows"], start=0, end=1),
            onnx.helper.make_node("Greater", ["rows", "two"], ["many"]),
            onnx.helper.make_node("Add", ["honest", "honest"], ["doubled"]),
            onnx.helper.make_node("Where", ["many", "doubled", "honest"], ["y"]),
        ]
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([2], np.int64), "two"))
    other = path.with_name("other") / path.name
    other.parent.mkdir()
    onnx.save(model, other)
    return other


@pytest.mark.matrix
def test_unsigned_derived_files_are_not_served_under_a_policy(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The derived cache lies in the store, where an attacker may have put another model that passes the goldens."""
    monkeypatch.setattr(prepacked, "MIN_BYTES", 1)
    honest = large_models.layers(tmp_path)
    fraud = doubled_for_three(honest)
    made, wrong = (
        large_models.push(Store(tmp_path / f"store-{index}"), lambda folder, path=path: path)  # type: ignore[misc]
        for index, path in enumerate((honest, fraud))
    )
    store = Store(tmp_path / "store")
    store.push(signed(made), "layers:1")
    where, what = (
        Prepacked.of_variant(item.variant(), Settings(device="cpu")) for item in (store.get("layers:1"), wrong)
    )
    assert where is not None
    assert what is not None
    assert what.build(where.entry())
    x = {"x": np.ones((3, 512), np.float32)}
    with ingot.serve("layers:1", store=store, trust=policy, **FREE) as server, Client(server.http_url) as client:
        answer = client.infer("layers", x)["y"]
        assert "ingot_derived_cache_total{" not in client.metrics()
    np.testing.assert_array_equal(answer, load_engine(EngineSpec(honest)).run(x)["y"])


@pytest.mark.parametrize("source", ["team/double:1", "team/double:1#int8"])
def test_a_blob_that_was_changed_in_the_store_is_refused(store: Store, policy: Path, source: str) -> None:
    tamper(store.get("team/double:1").variant("int8").path())
    with pytest.raises(InvalidArchive, match="is damaged: its content has another digest"):
        ingot.serve(source, store=store, trust=policy, **FREE)


def test_of_a_variant_that_is_named_no_other_is_read(store: Store, policy: Path) -> None:
    tamper(store.get("team/double:1").variant("int8").path())
    with ingot.serve("team/double:1#fp32", store=store, trust=policy, **FREE) as server:
        assert server.models == ["double"]


def test_a_graph_that_reads_another_models_blobs_is_refused_though_it_is_signed(policy: Path, tmp_path: Path) -> None:
    blobs = BlobFolder.scratch()
    graph = blobs.put(forgeries.adding(forgeries.external("a" * 64)), manifest.WEIGHT)
    made = signed(forgeries.forged(blobs, samples.serving("double"), graph))
    with pytest.raises(InvalidArchive, match="refers to a blob that is not its own"):
        ingot.serve(made.copy_to(BlobFolder(tmp_path / "blobs")), trust=policy, **FREE)


def test_a_changed_signature_is_refused(store: Store, policy: Path) -> None:
    found = store.get("team/double:2")
    for descriptor in found.attached:
        tamper(store.blobs.path(descriptor))
    with pytest.raises(Untrusted, match="is damaged"):
        ingot.serve("team/double:2", store=store, trust=policy, **FREE)


def test_a_bare_file_is_served_only_where_no_signature_is_required(policy: Path, tmp_path: Path) -> None:
    path = onnx_models.affine(tmp_path)
    with pytest.raises(Untrusted, match="a bare file carries no signature; make an archive of it"):
        ingot.serve(str(path), trust=policy, **FREE)
    policy.write_text(f'[[rule]]\nnames = "affine"\nrequire_signature = false\n{policy.read_text()}')
    with ingot.serve(str(path), trust=policy, **FREE) as server:
        assert server.models == ["affine"]
    with pytest.raises(Untrusted, match="a bare file carries no signature"):
        ingot.serve(f"other={path}", trust=policy, **FREE)


def test_unsigned_models_that_are_accepted_are_logged(policy: Path, caplog: pytest.LogCaptureFixture) -> None:
    policy.write_text("require_signature = false\n")
    with ingot.serve(PLAIN, trust=policy, **FREE):
        pass
    told = [record for record in caplog.records if record.name == "ingot.runtime.loading.trust_check"]
    assert [record.levelno for record in told if "is unsigned, which the trust policy allows" in record.message] == [
        logging.WARNING
    ]


class TestCode:
    """The archive's program is invalid, so that the step at which loading fails shows whether it was allowed."""

    def test_a_rule_allows_it_for_what_its_keys_signed(self, policy: Path) -> None:
        policy.write_text(f"{policy.read_text()}allow_code = true\n")
        with pytest.raises(InvalidArgument) as caught:
            ingot.serve(signed(CODE), trust=policy, **FREE)
        assert not isinstance(caught.value, Unsupported | Untrusted)

    @pytest.mark.matrix
    def test_a_rule_that_does_not_say_so_does_not_allow_it(self, policy: Path) -> None:
        with pytest.raises(Unsupported, match="--allow-code"):
            ingot.serve(signed(CODE), trust=policy, **FREE)

    @pytest.mark.matrix
    def test_a_rule_for_one_model_allows_no_other(self, policy: Path) -> None:
        policy.write_text('[[rule]]\nnames = "double"\nkeys = ["team.pub"]\nallow_code = true\n' + policy.read_text())
        with pytest.raises(Unsupported, match="--allow-code"):
            ingot.serve(signed(CODE), trust=policy, **FREE)


def test_refusals_are_counted(policy: Path) -> None:
    repository = Repository(policy=Policy.load(policy))
    with pytest.raises(Untrusted):
        repository.add(PLAIN)
    registry: CollectorRegistry = repository.metrics.registry
    labels = {"model": "double", "version": "1", "result": "refused"}
    assert registry.get_sample_value("ingot_signature_checks_total", labels) == 1


def test_a_policy_that_cannot_be_read_stops_the_server(policy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy.write_text("require_signatures = true\n")
    monkeypatch.setenv("INGOT_TRUST", str(policy))
    with pytest.raises(InvalidArgument, match="there is no field 'require_signatures'"):
        ingot.serve(signed(), **FREE)


@pytest.mark.matrix
def test_a_model_in_a_registry_is_checked_by_its_rule_before_it_is_pulled(
    registry: str, store: Store, policy: Path, tmp_path: Path
) -> None:
    Registry(registry).push(signed(), "team/double:1")
    Registry(registry).push(CODE, "team/code:1")
    host = registry.partition("://")[2]
    policy.write_text(policy.read_text() + f'registry = "{host}"\n')
    here = Store(tmp_path / "here")
    with ingot.serve(f"{registry}/team/double:1", store=here, trust=policy, **FREE) as server:
        assert server.models == ["double"]
    with pytest.raises(Untrusted, match="it is unsigned"):
        ingot.serve(f"{registry}/team/code:1", store=here, trust=policy, **FREE)
    with pytest.raises(Untrusted, match="no rule names"):
        ingot.serve("team/double:1", store=store, trust=policy, **FREE)
    assert here.names() == [f"oci/{host.replace(':', '__')}/team/double"]
