-- The script of wrk: numbered requests, and every answer compared with what belongs to its number.
-- wrk is run with a thread for each connection, since a script is not told which connection an answer came by.
local threads = {}

function setup(thread)
    thread:set("first", 5 * #threads)
    table.insert(threads, thread)
end

function init(args)
    samples = dofile(args[1])
    number = first
    refused = 0
    wrong = 0
    example = ""
end

function request()
    number = number % #samples + 1
    return samples[number][1]
end

function response(status, headers, body)
    if status == 429 or status == 503 or status == 504 then
        refused = refused + 1
    elseif status ~= 200 or not string.find(body, samples[number][2], 1, true) then
        wrong = wrong + 1
        example = body
    end
end

function done(summary, latency, requests)
    local all = { refused = 0, wrong = 0 }
    for _, thread in ipairs(threads) do
        all.refused = all.refused + thread:get("refused")
        all.wrong = all.wrong + thread:get("wrong")
    end
    local errors = summary.errors
    local lost = errors.connect + errors.read + errors.write + errors.timeout
    io.write(string.format(
        '\nfound {"requests": %d, "seconds": %f, "p50_ms": %f, "p99_ms": %f, "refused": %d, "wrong": %d, "lost": %d}\n',
        summary.requests, summary.duration / 1e6, latency:percentile(50) / 1e3, latency:percentile(99) / 1e3,
        all.refused, all.wrong, lost))
end
