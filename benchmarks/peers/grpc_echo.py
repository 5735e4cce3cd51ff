"""The floor of any gRPC server in Python: ModelInfer that sends its input back and does nothing else.

    python benchmarks/peers/grpc_echo.py PORT [--sync] [--plain-loop]

An aio server on uvloop; `--sync` is gRPC's threaded one, `--plain-loop` leaves uvloop out. Prints `ready`.
"""

import argparse
import asyncio
from concurrent.futures import ThreadPoolExecutor

import grpc
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc as pb_grpc

OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


def answer(request: pb.ModelInferRequest) -> pb.ModelInferResponse:
    output = pb.ModelInferResponse.InferOutputTensor(
        name="y", datatype=request.inputs[0].datatype, shape=request.inputs[0].shape
    )
    return pb.ModelInferResponse(
        model_name=request.model_name, outputs=[output], raw_output_contents=request.raw_input_contents
    )


class Echo(pb_grpc.GRPCInferenceServiceServicer):
    def ModelInfer(self, request, context):
        return answer(request)


class AioEcho(pb_grpc.GRPCInferenceServiceServicer):
    async def ModelInfer(self, request, context):
        return answer(request)


async def serve(port: int) -> None:
    server = grpc.aio.server(options=OPTIONS)
    pb_grpc.add_GRPCInferenceServiceServicer_to_server(AioEcho(), server)
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    print("ready", flush=True)
    await server.wait_for_termination()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("port", type=int)
    parser.add_argument("--sync", action="store_true")
    parser.add_argument("--plain-loop", action="store_true")
    options = parser.parse_args()
    if options.sync:
        server = grpc.server(ThreadPoolExecutor(16), options=OPTIONS)
        pb_grpc.add_GRPCInferenceServiceServicer_to_server(Echo(), server)
        server.add_insecure_port(f"127.0.0.1:{options.port}")
        server.start()
        print("ready", flush=True)
        server.wait_for_termination()
    elif options.plain_loop:
        asyncio.run(serve(options.port))
    else:
        import uvloop

        uvloop.run(serve(options.port))


if __name__ == "__main__":
    main()
