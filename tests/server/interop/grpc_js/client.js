// Asks a server with gRPC's client for Node.js and prints what came of it as JSON: node client.js HOST:PORT PROTO
'use strict';

const grpc = require('@grpc/grpc-js');
const loader = require('@grpc/proto-loader');

const [address, proto] = process.argv.slice(2);
const { inference } = grpc.loadPackageDefinition(loader.loadSync(proto, { keepCase: true, longs: Number }));
const client = new inference.GRPCInferenceService(address, grpc.credentials.createInsecure(), {
  'grpc.max_receive_message_length': -1,
  'grpc.max_send_message_length': -1,
});

function request(model, values, shape) {
  return {
    model_name: model,
    inputs: [{ name: 'x', datatype: 'FP32', shape }],
    raw_input_contents: [Buffer.from(Float32Array.from(values).buffer)],
  };
}

function floats(reply) {
  const raw = Buffer.from(reply.raw_output_contents[0]); // aligned, as Float32Array needs it
  return new Float32Array(raw.buffer.slice(raw.byteOffset, raw.byteOffset + raw.length));
}

// Resolves with the answer's numbers, or with the status when there is none; `started` is given the call.
function ask(message, { deadline = 60_000, started = () => {} } = {}) {
  return new Promise((resolve) => {
    const call = client.ModelInfer(message, { deadline: Date.now() + deadline }, (error, reply) => {
      resolve(error ? { status: error.code } : { floats: floats(reply) });
    });
    started(call);
  });
}

function row(number) {
  return [number, number + 0.25, -number];
}

function isAnswer(number, { floats: found }) {
  return found !== undefined && row(number).every((value, index) => found[index] === 2 * value + 1);
}

async function load(calls) {
  const answers = await Promise.all(
    Array.from({ length: calls }, (_, number) => ask(request('affine', row(number), [1, 3]))),
  );
  return answers.filter((answer, number) => isAnswer(number, answer)).length;
}

async function large(calls) {
  const size = 1 << 20;
  const answers = await Promise.all(
    Array.from({ length: calls }, (_, number) => {
      return ask(request('increment', new Float32Array(size).fill(number), [1, size]));
    }),
  );
  return answers.filter(({ floats: found }, number) => {
    return found !== undefined && found.length === size && found.every((value) => value === number + 1);
  }).length;
}

// The test lets no call of it be answered.
const held = () => request('held', [1], [1, 1]);

async function late(calls) {
  const answers = await Promise.all(Array.from({ length: calls }, () => ask(held(), { deadline: 20 })));
  return answers.filter(({ status }) => status === grpc.status.DEADLINE_EXCEEDED).length;
}

async function cancelled(calls) {
  const started = (call) => setTimeout(() => call.cancel(), 20);
  const answers = await Promise.all(Array.from({ length: calls }, () => ask(held(), { started })));
  return answers.filter(({ status }) => status === grpc.status.CANCELLED).length;
}

async function main() {
  const result = { load: await load(600), large: await large(8) };
  [result.late, result.cancelled, result.beside] = await Promise.all([late(8), cancelled(8), load(200)]);
  result.unknown = (await ask(request('nope', [1], [1]))).status;
  client.close();
  console.log(JSON.stringify(result));
}

main();
