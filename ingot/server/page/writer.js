// A form for the prompt of a model that writes text, which is shown as it comes.
import {get} from "/ui/page.js";
import {make, time} from "/ui/draw.js";

const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

const tasks = ["text-generation", "text2text-generation", "translation", "summarization"];

export const writes = ({properties}) => tasks.includes(properties?.task);

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
async function write(card, path, {body}, refusal) {
  const began = performance.now(), place = make("p", {class: "written"}), count = make("small");
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
      const {text, error} = JSON.parse(event.slice("data: ".length));
      if (error) throw new Error(error);
      first ??= performance.now();
      place.append(text);
    }
    count.textContent = `the first piece after ${time((first - began) / 1000)}, all after ${time((performance.now() - began) / 1000)}`;
  }
}
