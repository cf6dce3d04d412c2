// The page of a server: reads what monitoring reads, /metrics and the statistics, once a second.
import {series, quantile, difference} from "/ui/metrics.js";
import {chart, bars, stages, make, time, count} from "/ui/draw.js";
import {form, ask, copied} from "/ui/try.js";

const PERIOD = 1000; // ms between two polls
const KEPT = 120; // looks in a chart
const RECENT = 10; // looks that a latency is computed of
const find = (id) => document.getElementById(id);
let token = "", chosen = null, past = [], shownArchive = "";
const history = new Map(); // by model: a list of points

export async function get(path, options = {}) {
  const headers = {...options.headers, ...(token ? {Authorization: `Bearer ${token}`} : {})};
  const answer = await fetch(path, {...options, headers, cache: "no-store"});
  if (answer.status === 401 || answer.status === 403) find("key").hidden = false;
  if (!answer.ok && !options.whole) throw new Error(`${path}: ${answer.status}`);
  return answer;
}

async function look() {
  const [metrics, statistics] = await Promise.all([
    get("/metrics").then((answer) => answer.text()),
    get("/v2/models/stats").then((answer) => answer.json()),
  ]);
  return {at: performance.now() / 1000, metrics: series(metrics), models: statistics.model_stats};
}

function numbers(model, now, before) {
  const seconds = Math.max(1e-3, now.at - before.at), labels = {model: model.name, version: model.version};
  const delta = (name, more = {}) => difference(now.metrics, before.metrics, name, {...labels, ...more});
  const recent = past[0];
  const latency = (share) => quantile(now.metrics, recent.metrics, "ingot_request_seconds", labels, share);
  const calls = delta("ingot_batch_size_count"), padded = (kind) => delta("ingot_padding_elements_total", {kind});
  return {
    rate: delta("ingot_requests_total") / seconds,
    failed: (delta("ingot_requests_total") - delta("ingot_requests_total", {code: "ok"})) / seconds,
    p50: latency(0.5), p99: latency(0.99),
    queue: difference(now.metrics, [], "ingot_queued_requests", labels),
    rows: calls ? delta("ingot_batch_size_sum") / calls : null,
    slots: difference(now.metrics, [], "ingot_slots_bytes", labels)
      ? difference(now.metrics, [], "ingot_slots_in_use", labels) : null,
    tokens: delta("ingot_tokens_total", {kind: "answer"}) / seconds,
    first: quantile(now.metrics, recent.metrics, "ingot_first_token_seconds", labels, 0.5),
    between: quantile(now.metrics, recent.metrics, "ingot_between_tokens_seconds", labels, 0.5),
    padding: padded("real") ? 100 * padded("padding") / (padded("real") + padded("padding")) : null,
  };
}

function table(now) {
  const body = find("models").tBodies[0];
  body.replaceChildren(...now.models.map((model) => {
    const key = `${model.name}:${model.version}`, last = history.get(key).at(-1);
    const name = make("button", {class: "plain", type: "button", "data-model": key}, key);
    name.addEventListener("click", () => choose(key));
    const state = model.ingot.state ?? "ready";
    const candidate = tried(now, {model: model.name, version: model.version});
    const share = !candidate ? "" : candidate.weight ? ` canary ${count(candidate.weight)} %` : " shadow";
    const cells = [name, make("span", {}, make("span", {class: state === "ready" ? "good" : "bad"}, state), make("small", {}, share),
      make("small", {class: "bad", title: model.ingot.update_failed ?? ""}, model.ingot.update_failed ? " update failed" : "")),
      [model.ingot.variant, model.ingot.device].filter(Boolean).join(", "), count(last.rate), time(last.p50), time(last.p99),
      count(last.queue), count(last.rows)];
    return make("tr", key === chosen ? {class: "chosen"} : {}, ...cells.map((cell) => make("td", {}, cell)));
  }));
}

function choose(key) {
  chosen = key;
  shownArchive = "";
  const [name, version] = split(key);
  find("chosen").textContent = key;
  get(`/v2/models/${encodeURIComponent(name)}/versions/${encodeURIComponent(version)}`)
    .then((answer) => answer.json())
    .then((metadata) => form(find("inputs"), metadata))
    .catch((error) => find("inputs").replaceChildren(make("p", {class: "bad"}, error.message)));
  for (const id of ["answers", "copied"]) find(id).replaceChildren();
  if (past.length) show(past.at(-1));
}

const split = (key) => [key.slice(0, key.lastIndexOf(":")), key.slice(key.lastIndexOf(":") + 1)];

function show(now) {
  table(now);
  const model = now.models.find((each) => `${each.name}:${each.version}` === chosen);
  if (!model) return;
  const points = history.get(chosen), last = points.at(-1);
  find("charts").replaceChildren(
    chart("Requests per second", count(last.rate), [points.map((point) => point.rate)], count),
    chart("Latency, p50 and p99", `${time(last.p50)} / ${time(last.p99)}`,
      [points.map((point) => point.p50), points.map((point) => point.p99)], time),
    chart("Requests in the queue", count(last.queue), [points.map((point) => point.queue)], count),
    chart("Mean rows per engine call", count(last.rows), [points.map((point) => point.rows)], count),
    ...(last.slots === null ? [] : [
      chart("Tokens per second", count(last.tokens), [points.map((point) => point.tokens)], count),
      chart("First token, and each further one, p50", `${time(last.first)} / ${time(last.between)}`,
        [points.map((point) => point.first), points.map((point) => point.between)], time),
      chart("Slots in use", count(last.slots), [points.map((point) => point.slots)], count)]),
    ...(model.ingot.padding ? [chart("Padding, % of elements", count(last.padding), [points.map((point) => point.padding)], count)] : []));
  const recent = past[0];
  const before = recent.models.find((each) => each.name === model.name && each.version === model.version);
  find("stages").replaceChildren(stages(model, before, now.metrics, recent.metrics));
  const labels = {model: model.name, version: model.version};
  find("batches").replaceChildren(bars(now.metrics, recent.metrics, "ingot_batch_size", labels));
  errors(now, recent);
  canary(now, labels);
  archive(model);
}

function errors(now, recent) {
  const found = now.metrics.filter((each) => each.name === "ingot_errors_total" && each.value > 0);
  const rows = found.map(({labels, value}) => {
    const fresh = difference(now.metrics, recent.metrics, "ingot_errors_total", labels);
    const cells = [`${labels.protocol}: ${labels.code.replaceAll("_", " ")}`, count(value), fresh ? `+${count(fresh)}` : ""];
    return make("tr", {}, ...cells.map((cell) => make("td", fresh ? {class: "bad"} : {}, cell)));
  });
  const head = make("tr", {}, ...["error", "in all", "in 10 s"].map((text) => make("th", {scope: "col"}, text)));
  find("errors").replaceChildren(rows.length ? make("table", {}, make("thead", {}, head), make("tbody", {}, ...rows))
    : make("p", {class: "soft"}, "None since the server started."));
}

// The candidate that is tried for a model, or null.
function tried(now, labels) {
  const read = (name) => now.metrics.find((each) => each.name === `ingot_canary_${name}`
    && each.labels.model === labels.model && each.labels.version === labels.version)?.value;
  const weight = read("weight_percent");
  if (weight === undefined) return null;
  return {weight, kind: weight ? "Canary" : "Shadow", error: read("worst_error"), ratio: read("latency_ratio")};
}

function canary(now, labels) {
  const found = tried(now, labels);
  find("canary").hidden = !found;
  if (!found) return;
  const of = (name, more) => difference(now.metrics, [], `ingot_canary_${name}_total`, {...labels, ...more});
  const [answered, failed] = ["ok", "failed"].map((result) => of("requests", {to: "candidate", result}));
  const [agreed, differed, dropped] = ["agreed", "differed", "dropped"].map((result) => of("comparisons", {result}));
  const error = Number.isFinite(found.error) ? found.error.toPrecision(2) : "infinite";
  const rows = [["share of the requests", found.weight ? `${count(found.weight)} %` : "none: the candidate answers copies"],
    ["its requests", `${count(answered)} answered, ${count(failed)} failed`, failed],
    ["compared answers", `${count(agreed)} agreed, ${count(differed)} differed, ${count(dropped)} dropped`, differed],
    ["largest error", agreed + differed ? error : "none yet"],
    ["p99 latency", Number.isFinite(found.ratio) ? `${found.ratio.toFixed(2)} times the current model's` : "none yet"]];
  find("canary-title").textContent = found.kind;
  find("canary").querySelector("dl").replaceChildren(...rows.flatMap(([name, value, bad]) =>
    [make("dt", {}, name), make("dd", bad ? {class: "bad"} : {}, value)]));
}

function archive(model) {
  const variants = model.ingot.variants ?? [], text = JSON.stringify([model.ingot.digest, variants, model.ingot.variant]);
  find("archive").hidden = !variants.length;
  if (text === shownArchive || !variants.length) return;
  shownArchive = text;
  find("digest").replaceChildren("Digest ", make("code", {}, model.ingot.digest));
  const head = ["variant", "precision", "size", "largest error", "metric", "loss", "time per call"];
  const rows = variants.map((each) => {
    const metric = each.metric, times = Object.entries(each.latency);
    const cells = [each.name === model.ingot.variant ? `${each.name} (served)` : each.name, each.precision,
      `${count(each.size / 1024)} KiB`, each.error == null ? "" : each.error.toExponential(1),
      metric ? `${metric.name} ${metric.after.toFixed(4)}` : "", metric ? metric.drop.toFixed(4) : "",
      times.map(([rows, seconds]) => `${rows}: ${time(seconds)}`).join(", ")];
    return make("tr", {}, ...cells.map((cell) => make("td", {}, cell)));
  });
  find("archive").querySelector("table").replaceChildren(
    make("thead", {}, make("tr", {}, ...head.map((each) => make("th", {scope: "col"}, each)))), make("tbody", {}, ...rows));
}

async function tick() {
  const status = find("status");
  try {
    const now = await look(), before = past.at(-1) ?? now;
    past = [...past, now].slice(-RECENT - 1);
    for (const model of now.models) {
      const key = `${model.name}:${model.version}`, points = history.get(key) ?? [];
      points.push(numbers(model, now, before));
      history.set(key, points.slice(-KEPT));
    }
    status.className = "";
    status.textContent = `Live: ${now.models.length} ${now.models.length === 1 ? "model" : "models"}`;
    find("key").hidden = true;
    if (!chosen && now.models.length) choose(`${now.models[0].name}:${now.models[0].version}`);
    else show(now);
  } catch (error) {
    status.className = "bad";
    status.textContent = `No answer from the server: ${error.message}`;
  }
  setTimeout(tick, PERIOD);
}

find("key").addEventListener("submit", (event) => {
  event.preventDefault();
  token = find("token").value;
});

find("try").addEventListener("submit", async (event) => {
  event.preventDefault();
  const keys = past.at(-1).models.map((model) => `${model.name}:${model.version}`);
  const asked = find("all").checked ? [chosen, ...keys.filter((key) => key !== chosen)] : [chosen];
  find("send").disabled = true;
  await ask(find("answers"), asked.map(split));
  find("send").disabled = false;
});

for (const kind of ["curl", "python"]) {
  find(`copy-${kind}`).addEventListener("click", async () => {
    let text;
    try {
      text = copied(kind, split(chosen));
    } catch (error) {
      find("copied").textContent = error.message;
      return;
    }
    // A browser has a clipboard for pages of this machine and over HTTPS only; the text can be selected otherwise.
    const done = await navigator.clipboard?.writeText(text).then(() => true, () => false);
    find("copied").replaceChildren(done ? "Copied: " : "Select and copy: ", make("code", {}, text.length > 4000 && done ? `${text.slice(0, 400)} ...` : text));
  });
}

get("/v2").then((answer) => answer.json()).then((server) => { find("version").textContent = server.version; }).catch(() => {});
tick();
