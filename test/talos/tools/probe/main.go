// Command probe is the smallest extension service that proves something: as a Talos extension it talks to machine.sock, prints
// what it received as one line of JSON, and waits for its end. The test bed installs it where no other extension is given. It
// never writes anything, and never leaves the machine.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/cosi-project/runtime/pkg/resource"
	"github.com/siderolabs/talos/pkg/machinery/client"
	"github.com/siderolabs/talos/pkg/machinery/constants"
	"github.com/siderolabs/talos/pkg/machinery/resources/config"
	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	"github.com/siderolabs/talos/pkg/machinery/role"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
)

// Report is what the probe prints.
type Report struct {
	UID         int    `json:"uid"`
	Version     string `json:"version"`
	MachineType string `json:"machineType"`
	Platform    string `json:"platform"`
	Environment string `json:"environment,omitempty"`
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()

	report, err := ask(ctx)
	if err != nil {
		fmt.Fprintln(os.Stderr, "probe:", err)
		os.Exit(1)
	}

	if err := json.NewEncoder(os.Stdout).Encode(report); err != nil {
		fmt.Fprintln(os.Stderr, "probe:", err)
		os.Exit(1)
	}

	<-ctx.Done()
}

func ask(ctx context.Context) (Report, error) {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()

	c, err := client.New(ctx,
		client.WithUnixSocket(constants.MachineSocketPath),
		client.WithGRPCDialOptions(grpc.WithTransportCredentials(insecure.NewCredentials())))
	if err != nil {
		return Report{}, fmt.Errorf("connect to %s: %w", constants.MachineSocketPath, err)
	}
	defer c.Close() //nolint:errcheck // the process ends with it

	ctx = metadata.AppendToOutgoingContext(ctx, constants.APIAuthzRoleMetadataKey, string(role.Reader))

	version, err := c.Version(ctx)
	if err != nil {
		return Report{}, fmt.Errorf("ask for version: %w", err)
	}

	machineType, err := c.COSI.Get(ctx, resource.NewMetadata(
		config.NamespaceName, config.MachineTypeType, config.MachineTypeID, resource.VersionUndefined))
	if err != nil {
		return Report{}, fmt.Errorf("get machine type: %w", err)
	}

	platform, err := c.COSI.Get(ctx, resource.NewMetadata(
		runtime.NamespaceName, runtime.PlatformMetadataType, runtime.PlatformMetadataID, resource.VersionUndefined))
	if err != nil {
		return Report{}, fmt.Errorf("get platform metadata: %w", err)
	}

	report := Report{
		UID:         os.Getuid(),
		Version:     version.GetMessages()[0].GetVersion().GetTag(),
		Environment: os.Getenv("PROBE"),
	}

	if m, ok := machineType.(*config.MachineType); ok {
		report.MachineType = m.MachineType().String()
	}

	if p, ok := platform.(*runtime.PlatformMetadata); ok {
		report.Platform = p.TypedSpec().Platform
	}

	return report, nil
}
