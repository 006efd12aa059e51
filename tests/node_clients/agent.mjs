// An agent with the clients of Node: node agent.mjs URL MODEL messages|responses|chat. Prints one JSON line a turn.
//
// It reads a "file" in every turn, by a tool that it streams, and says what the engine reported. The tool runs until a
// line comes from stdin.
import Anthropic, { NotFoundError as NoSuchMessage } from "@anthropic-ai/sdk";
import { createInterface } from "node:readline";
import OpenAI, { NotFoundError as NoSuchModel } from "openai";

const TURNS = 3;
const LIMIT = 16000;
const [url, model, api] = process.argv.slice(2);
const parameters = { type: "object", properties: { path: { type: "string" } }, required: ["path"] };
const description = `Reads a file for an agent of ${api}`;
const text = (turn, words) => Array.from({ length: words }, (_, index) => `${api}-${turn}-${index}`).join(" ");
const options = { apiKey: "unused", maxRetries: 0 };
const told = createInterface({ input: process.stdin })[Symbol.asyncIterator]();
const toolRuns = () => told.next();
const say = (line) => console.log(JSON.stringify(line));

async function messages() {
  const client = new Anthropic({ ...options, baseURL: url });
  const conversation = [{ role: "user", content: text(0, 100) }];
  const tools = [{ name: "read_file", description, input_schema: parameters }];
  for (let turn = 1; turn <= TURNS; turn++) {
    const counted = await client.messages.countTokens({ model, messages: conversation, tools });
    const stream = client.messages.stream({ model, max_tokens: LIMIT, messages: conversation, tools });
    const answer = await stream.finalMessage();
    const [block] = answer.content;
    const { input_tokens: fresh, cache_read_input_tokens: cached, cache_creation_input_tokens: written } = answer.usage;
    const prompt = fresh + cached + written;
    say({ tool: block.name, arguments: Object.keys(block.input), prompt, cached, counted: counted.input_tokens });
    await toolRuns();
    const result = { type: "tool_result", tool_use_id: block.id, content: text(turn, 60) };
    conversation.push({ role: "assistant", content: answer.content }, { role: "user", content: [result] });
  }
  await client.messages.create({ model: "nope", max_tokens: 1, messages: conversation }).catch((error) => {
    say({ error: error.status, known: error instanceof NoSuchMessage, type: error.error.type });
  });
}

async function responses() {
  const client = new OpenAI({ ...options, baseURL: `${url}/v1` });
  const input = [{ role: "user", content: text(0, 100) }];
  const tools = [{ type: "function", name: "read_file", description, parameters, strict: true }];
  for (let turn = 1; turn <= TURNS; turn++) {
    const stream = client.responses.stream({ model, max_output_tokens: LIMIT, input, tools });
    const { output, usage } = await stream.finalResponse();
    const [call] = output;
    const cached = usage.input_tokens_details.cached_tokens;
    say({ tool: call.name, arguments: Object.keys(JSON.parse(call.arguments)), prompt: usage.input_tokens, cached });
    await toolRuns();
    const { call_id, name } = call;
    input.push({ type: "function_call", call_id, name, arguments: call.arguments });
    input.push({ type: "function_call_output", call_id, output: text(turn, 60) });
  }
  await client.responses.create({ model: "nope", input: "hello" }).catch((error) => {
    say({ error: error.status, known: error instanceof NoSuchModel });
  });
}

async function chat() {
  const client = new OpenAI({ ...options, baseURL: `${url}/v1` });
  const conversation = [{ role: "user", content: text(0, 100) }];
  const tools = [{ type: "function", function: { name: "read_file", description, parameters } }];
  for (let turn = 1; turn <= TURNS; turn++) {
    const request = { model, max_tokens: LIMIT, messages: conversation, tools, stream_options: { include_usage: true } };
    const { choices, usage } = await client.chat.completions.stream(request).finalChatCompletion();
    const [call] = choices[0].message.tool_calls;
    const cached = usage.prompt_tokens_details.cached_tokens;
    const given = Object.keys(JSON.parse(call.function.arguments));
    say({ tool: call.function.name, arguments: given, prompt: usage.prompt_tokens, cached });
    await toolRuns();
    conversation.push(choices[0].message, { role: "tool", tool_call_id: call.id, content: text(turn, 60) });
  }
  await client.chat.completions.create({ model: "nope", messages: conversation }).catch((error) => {
    say({ error: error.status, known: error instanceof NoSuchModel });
  });
}

await { messages, responses, chat }[api]();
process.stdin.destroy();
