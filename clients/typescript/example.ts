// Asks a kvscout gateway where a prompt should go, then has it run there:
//
//   npm run example -- localhost:7050 mock-model
import { Code, ConnectError, createClient } from "@connectrpc/connect";
import { createGrpcTransport } from "@connectrpc/connect-node";

import { Gateway } from "./generated/kvscout/v1/gateway_pb.js";

async function main(address: string, model: string): Promise<void> {
  const gateway = createClient(Gateway, createGrpcTransport({ baseUrl: `http://${address}` }));
  const tokenIds = Array.from({ length: 64 }, (_, index) => index + 1);

  const where = await gateway.route({ model, tokenIds }, { timeoutMs: 10_000 });
  console.log(
    `${where.worker?.workerId} rank ${where.worker?.dpRank} has ${where.overlapBlocks} of ${where.numBlocks} blocks`,
  );

  const request = { model, tokenIds, stopConditions: { maxTokens: 4 } };
  for await (const chunk of gateway.generate(request, { timeoutMs: 30_000 })) {
    // None are in a last message that has the usage alone.
    if (chunk.tokenIds.length > 0) console.log(chunk.tokenIds);
  }
}

const [address = "localhost:7050", model = "mock-model"] = process.argv.slice(2);
try {
  await main(address, model);
} catch (error) {
  const failure = ConnectError.from(error);
  const again = failure.metadata.get("retry-after");
  console.error(`${Code[failure.code]}: ${failure.rawMessage}${again === null ? "" : `, try again after ${again} s`}`);
  process.exitCode = 1;
}
