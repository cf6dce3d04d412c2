// Forms for models that answer in parts, which are shown as they come: the prompt of one that writes text, and the
// inputs of code.
import {get} from "/ui/page.js";
import {make, time} from "/ui/draw.js";

const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

const tasks = ["text-generation", "text2text-generation", "translation", "summarization"];

export const writes = ({properties}) => tasks.includes(properties?.task);

// A sample for a model whose code answers in parts: texts as they are, other values as JSON.
export function partsForm({inputs}) {
  const fields = inputs.map(({name, datatype}) => [name, datatype === "BYTES", make(datatype === "BYTES" ? "textarea" : "input", {})]);
  const values = () => Object.fromEntries(fields.map(([name, plain, field]) => [name, plain ? field.value : JSON.parse(field.value)]));
  const body = () => JSON.stringify(values());
  const shown = ({id, model_name, model_version, ...outputs}) => make("div", {}, JSON.stringify(outputs));
  return {
    element: make("fieldset", {class: "item"}, ...fields.map(([name, , field]) => make("label", {class: "field"}, make("span", {}, name), field))),
    request: () => ({body: body()}),
    fits: (other) => other.properties?.decoupled === "true" && other.inputs.map(({name}) => name).join() === inputs.map(({name}) => name).join(),
    curl: (url) => `curl -sN ${url.replace(/infer$/, "generate_stream")} -d ${quoted(body())}`,
    python: () => ({imports: [], streams: true, inputs: Object.entries(values()).map(([name, value]) => {
      const array = typeof value === "string" ? `np.array([${JSON.stringify(value)}.encode()], object)` : `np.array([${JSON.stringify(value)}])`;
      return `    ${JSON.stringify(name)}: ${array},`;
    })}),
    write: (card, path, request, refusal) => write(card, path, request, refusal, shown),
  };
}

export function promptForm() {
  const prompt = make("textarea", {rows: 4}), tokens = make("input", {type: "number", min: 1, value: 64});
  const warmth = make("input", {type: "number", min: 0, step: 0.1, placeholder: "the model's"});
  const labelled = (text, field) => make("label", {class: "field"}, make("span", {}, text), field);
  const parameters = () => ({max_tokens: Number(tokens.value), ...(warmth.value === "" ? {} : {temperature: Number(warmth.value)})});
  const body = () => JSON.stringify({text: prompt.value, parameters: parameters()});
  return {
    element: make("fieldset", {class: "item"}, labelled("prompt", prompt), labelled("most tokens", tokens), labelled("temperature", warmth)),
    request: () => ({body: body()}),
    fits: writes,
    curl: (url) => `curl -sN ${url.replace(/infer$/, "generate_stream")} -d ${quoted(body())}`,
    python: () => ({
      imports: [],
      inputs: [`    "text": np.array([${JSON.stringify(prompt.value)}.encode()], object),`],
      more: `, parameters=${JSON.stringify(parameters())}`,
    }),
    write,
  };
}

// Shows the pieces of a stream in a card; throws the server's error.
async function write(card, path, {body}, refusal, shown = ({text}) => text) {
  const began = performance.now(), place = make("div", {class: "written"}), count = make("small");
  card.append(place, count);
  const answer = await get(`${path}/generate_stream`, {method: "POST", body, headers: {"Content-Type": "application/json"}, whole: true});
  if (!answer.ok) throw new Error((await refusal(answer)).error);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = "", first = null; ;) {
    const {done, value} = await reader.read();
    if (done) break;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const {error, ...answer} = JSON.parse(event.slice("data: ".length));
      if (error) throw new Error(error);
      first ??= performance.now();
      place.append(shown(answer));
    }
    if (first !== null) count.textContent = `the first piece after ${time((first - began) / 1000)}, all after ${time((performance.now() - began) / 1000)}`;
  }
}
