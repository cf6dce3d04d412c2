// Sign and verify Sigstore bundles with a key. `node bundle.js verify KEY.pub BUNDLE` exits with 1 if the bundle is not
// signed by the key; `node bundle.js sign KEY.pem PAYLOAD` prints a bundle around an in-toto statement.
const crypto = require("crypto");
const fs = require("fs");
const { bundleFromJSON, bundleToJSON } = require("@sigstore/bundle");
const { DSSEBundleBuilder } = require("@sigstore/sign");
const { toSignedEntity, Verifier } = require("@sigstore/verify");

const [action, keyFile, file] = process.argv.slice(2);
const content = fs.readFileSync(file);

function verify() {
  const publicKey = crypto.createPublicKey(fs.readFileSync(keyFile));
  const material = {
    certificateAuthorities: [],
    timestampAuthorities: [],
    tlogs: [],
    ctlogs: [],
    publicKey: () => ({ publicKey, validFor: () => true }),
  };
  const none = { tlogThreshold: 0, ctlogThreshold: 0, tsaThreshold: 0, timestampThreshold: 0 };
  new Verifier(material, none).verify(toSignedEntity(bundleFromJSON(JSON.parse(content))));
}

async function sign() {
  const privateKey = crypto.createPrivateKey(fs.readFileSync(keyFile));
  const publicKey = crypto.createPublicKey(privateKey).export({ type: "spki", format: "pem" });
  const signer = {
    sign: async (data) => ({
      signature: crypto.sign("sha256", data, privateKey),
      key: { $case: "publicKey", publicKey, hint: "its own" },
    }),
  };
  const builder = new DSSEBundleBuilder({ signer, witnesses: [] });
  const bundle = await builder.create({ data: content, type: "application/vnd.in-toto+json" });
  console.log(JSON.stringify(bundleToJSON(bundle)));
}

(async () => (action === "sign" ? sign() : verify()))().catch((error) => {
  console.error(error.message);
  process.exit(1);
});
