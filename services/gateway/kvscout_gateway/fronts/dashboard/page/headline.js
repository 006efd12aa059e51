// The first line: what is saved, and what goes on.
function tiles(list, shown) {
  if (list.children.length !== shown.length)
    list.replaceChildren(...shown.map(() => element("div", {}, element("dt"), element("dd"), element("dd", { className: "note" }))));
  shown.forEach((texts, index) => texts.forEach((text, part) => say(list.children[index].children[part], text)));
}
function showHeadline({ totals, possible }) {
  const { cached, prompt, gpu_seconds, token_seconds, hit } = totals;
  const share = possible.share, failed = totals.failed.engine + totals.failed.router;
  tiles($("savings"), [
    ["Prompt tokens not computed", prompt ? figure(cached) : "–", prompt ? `of ${figure(prompt)} since the start` : "no prompt yet"],
    ["GPU seconds saved", gpu_seconds == null ? "–" : figure(gpu_seconds), gpu_seconds == null ? prompt ? "once the prefill speed is learned" : "estimated from prefill speed" : `estimated, at ${seconds(token_seconds)} a token`],
    ["Hit rate", percent(hit), share == null ? prompt ? "of all prompt tokens" : "no prompt yet" : `${percent(share)} of what was possible`],
  ]);
  $("savings").children[1].title = "Cached prompt tokens × the time of a prompt token that the schedulers have learned, one GPU a worker rank";
  $("savings").children[2].title = share == null ? "" : `Blocks that the chosen worker had ÷ blocks that the worker with most had, in the last ${many(possible.decisions, "decision")} that were watched`;
  tiles($("now"), [
    ["Requests", totals.rate == null ? "–" : `${figure(totals.rate, 2)}/s`, `${figure(totals.requests)} in total`],
    ["Running", figure(totals.in_flight), "at the gateways"],
    ["Waiting", figure(totals.queued), "for a worker"],
    ["Failed", figure(failed), `and ${figure(totals.failed.caller)} by callers`],
  ]);
}
