// The form to ask a model: texts, pictures and sounds for a model with steps, else tensors; and the answers.
import {get} from "/ui/page.js";
import {make, time} from "/ui/draw.js";
import {rawForm} from "/ui/raw.js";
import {tensorForm} from "/ui/tensors.js";
import {partsForm, promptForm, writes} from "/ui/writer.js";

let asked = null, metadata = null;

export function form(parent, found) {
  metadata = found;
  if (writes(found) && found.inputs[0].name === "text") {
    show(parent, promptForm());
    return;
  }
  if (found.properties?.decoupled === "true" && found.platform === "python") {
    show(parent, partsForm(found));
    return;
  }
  if (!found.properties?.raw_inputs) {
    show(parent, tensorForm(found));
    return;
  }
  const raw = rawForm(found), tensors = tensorForm(found), other = make("input", {type: "checkbox"});
  other.addEventListener("change", () => { asked = other.checked ? tensors : raw; place.replaceChildren(asked.element); });
  const place = make("div", {}, raw.element);
  const switched = make("p", {}, make("label", {class: "soft"}, other, " send the graph's tensors instead"));
  show(parent, raw, make("p", {class: "soft"}, `task: ${found.properties.task}`), place, switched);
}

function show(parent, chosen, ...parts) {
  asked = chosen;
  parent.replaceChildren(...(parts.length ? parts : [chosen.element]));
}

// The request of the form as a command, and as a program.
export function copied(kind, [name, version]) {
  const base = location.origin, literal = (value) => JSON.stringify(value);
  if (kind === "curl") return asked.curl(`${base}${address([name, version])}/infer`);
  const {imports, inputs, more = "", streams} = asked.python();
  const call = `(${literal(name)}, inputs, version=${literal(version)}${more})`;
  return [...imports, "import ingot", "import numpy as np", "", "inputs = {", ...inputs, "}", `with ingot.Client(${literal(base)}) as client:`,
    ...(streams ? [`    for answer in client.stream${call}:`, "        print(answer)"] : [`    print(client.infer${call})`])].join("\n");
}

const address = ([name, version]) => `/v2/models/${encodeURIComponent(name)}/versions/${encodeURIComponent(version)}`;

export async function ask(parent, models) {
  const form = asked, answers = [];
  let request;
  try {
    request = form.request();
  } catch (error) {
    parent.replaceChildren(make("p", {class: "bad", role: "alert"}, error.message));
    return;
  }
  if (form.write) parent.replaceChildren();
  for (const [index, model] of models.entries()) {
    const other = index ? await fitting(form, address(model)) : metadata;
    if (other && form.write) await written(parent, form, request, model);
    else if (other) answers.push(await answered(form, request, model, other));
  }
  if (!form.write) parent.replaceChildren(make("div", {class: "grid"}, ...answers));
}

// An answer that is shown while it is written.
async function written(parent, form, request, model) {
  const card = make("section", {class: "card answer"}, make("h3", {}, model.join(":")));
  parent.append(card);
  try {
    await form.write(card, address(model), request, refusal);
  } catch (error) {
    card.append(fault(error.message));
  }
}

// The metadata of a model that has the same inputs as the form; null of another.
async function fitting(form, path) {
  const found = await get(path).then((answer) => answer.json()).catch(() => null);
  return found && form.fits(found) ? found : null;
}

async function answered(form, {body, headers}, model, described) {
  const began = performance.now();
  let parts;
  try {
    const options = {method: "POST", body, headers: {"Content-Type": "application/json", ...headers}, whole: true};
    const answer = await get(`${address(model)}/infer`, options), content = await (answer.ok ? form.read(answer) : refusal(answer));
    const seconds = (performance.now() - began) / 1000;
    parts = [make("h3", {}, `${model.join(":")} `, make("small", {}, `in ${time(seconds)}, network included`)),
      ...(content.error ? [fault(content.error)] : await form.draw(content, described))];
  } catch (error) {
    parts = [make("h3", {}, model.join(":")), fault(error.message)];
  }
  return make("section", {class: "card answer"}, ...parts);
}

const fault = (text) => make("p", {class: "bad", role: "alert"}, text);

// The error of the server as it is; a proxy may have written something else than JSON.
async function refusal(answer) {
  const text = await answer.text();
  try {
    return {error: JSON.parse(text).error ?? text};
  } catch {
    return {error: `${answer.status}: ${text}`};
  }
}
