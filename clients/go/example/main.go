// Asks a kvscout gateway where a prompt should go, then has it run there:
//
//	go run ./example localhost:7050 mock-model
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	pb "github.com/kvscout/kvscout/clients/go/kvscoutv1"
)

func main() {
	if err := run(os.Args[1], os.Args[2]); err != nil {
		explain(err)
		os.Exit(1)
	}
}

func run(address, model string) error {
	connection, err := grpc.NewClient(address, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer connection.Close()
	gateway := pb.NewGatewayClient(connection)
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()

	prompt := make([]uint32, 64)
	for index := range prompt {
		prompt[index] = uint32(index + 1)
	}
	where, err := gateway.Route(ctx, &pb.RouteRequest{Model: model, TokenIds: prompt})
	if err != nil {
		return err
	}
	fmt.Printf("%s rank %d has %d of %d blocks\n",
		where.Worker.WorkerId, where.Worker.DpRank, where.OverlapBlocks, where.NumBlocks)

	stop := &pb.StopConditions{MaxTokens: proto.Uint32(4)}
	stream, err := gateway.Generate(ctx, &pb.GenerateRequest{Model: model, TokenIds: prompt, StopConditions: stop})
	if err != nil {
		return err
	}
	for {
		chunk, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if len(chunk.TokenIds) > 0 { // none are in a last message that has the usage alone
			fmt.Println(chunk.TokenIds)
		}
	}
}

// explain tells which field was wrong, or when to try again, where the gateway says so.
func explain(err error) {
	fmt.Fprintln(os.Stderr, err)
	for _, detail := range status.Convert(err).Details() {
		switch detail := detail.(type) {
		case *errdetails.BadRequest:
			for _, violation := range detail.FieldViolations {
				fmt.Fprintf(os.Stderr, "field %s: %s\n", violation.Field, violation.Description)
			}
		case *errdetails.RetryInfo:
			fmt.Fprintf(os.Stderr, "try again after %s\n", detail.RetryDelay.AsDuration())
		}
	}
}
