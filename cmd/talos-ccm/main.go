// Command talos-ccm is a cloud controller manager for Talos Linux that runs as a Talos system extension.
package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"runtime/debug"
	"syscall"

	"github.com/spf13/pflag"
	"google.golang.org/grpc/grpclog"
	"k8s.io/component-base/logs"
	_ "k8s.io/component-base/metrics/prometheus/clientgo" // client-go's metrics
	"k8s.io/klog/v2"

	"github.com/talos-ccm/talos-ccm/pkg/ccm"
	"github.com/talos-ccm/talos-ccm/pkg/privilege"
	"github.com/talos-ccm/talos-ccm/pkg/version"
)

func main() {
	// gRPC logs every connection attempt; talos-ccm reports unreachable machines itself, once.
	grpclog.SetLoggerV2(grpclog.NewLoggerV2(io.Discard, io.Discard, os.Stderr))

	executed, err := run(context.Background())
	klog.Flush()

	switch {
	case errors.Is(err, errDifferent):
		os.Exit(exitDifferent)
	case errors.Is(err, errAttention):
		os.Exit(exitAttention)
	}

	if restart := (*ccm.RestartError)(nil); errors.As(err, &restart) {
		// Talos would not supervise a new process.
		path, pathErr := os.Executable()
		if pathErr == nil {
			pathErr = syscall.Exec(path, os.Args, restart.Environment) // does not return if it succeeds
		}

		err = fmt.Errorf("replace the process: %w", pathErr)
	}

	if err != nil {
		fmt.Fprintln(os.Stderr, "Error:", err)

		if executed == diffName {
			os.Exit(exitTrouble)
		}

		os.Exit(1)
	}
}

// run returns the name of the executed command.
func run(ctx context.Context) (executed string, err error) {
	// A package of k8s.io/component-base registers a --version flag there, which cobra would add to all commands.
	pflag.CommandLine = pflag.NewFlagSet("", pflag.ContinueOnError)

	options, err := ccm.NewOptions()
	if err != nil {
		return "", err
	}

	options.Environment = os.Environ()
	options.CheckEnvironment = func(environ []string) error { return checkEnvironment(os.Args[1:], environ) }

	root, stdout := newCommand(options, logs.NewOptions()), &output{Writer: os.Stdout}
	root.SetOut(stdout)

	cmd, err := root.ExecuteContextC(ctx)

	return cmd.Name(), cmp.Or(err, stdout.err)
}

// output keeps the first error, because cobra and tables ignore it.
type output struct {
	io.Writer

	err error
}

// Write implements io.Writer.
func (o *output) Write(text []byte) (int, error) {
	n, err := o.Writer.Write(text)
	o.err = cmp.Or(o.err, err)

	return n, err
}

// gcPercent makes the heap smaller than Go's default of 100. It costs little CPU time, because most of the heap lives as
// long as the machines are watched.
const gcPercent = 50

// start runs the service until the first signal. A second signal ends the process immediately. The other commands
// install no signal handler.
func start(ctx context.Context, options *ccm.Options) error {
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(gcPercent)
	}

	// The logger of component-base ignores klog's filters. klog writes the same text format.
	klog.ClearLogger()
	klog.SetLogFilter(withoutBodies{})

	ctx, stop := signal.NotifyContext(ctx, syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	defer context.AfterFunc(ctx, stop)()

	if err := options.Validate(); err != nil {
		if options.MachineSocket == "" && options.Talosconfig == "" {
			err = fmt.Errorf("%w\n\n%s", err, nothingToRead)
		}

		return err
	}

	if options.DropPrivileges {
		if err := privilege.RaiseOpenFiles(); err != nil {
			klog.Background().Info("Failed to raise RLIMIT_NOFILE; continuing", "err", err)
		}

		if err := privilege.RaiseOOMScore(); err != nil {
			klog.Background().Info("Failed to raise OOM score; continuing", "err", err)
		}

		if err := privilege.Drop(options.Directories()...); err != nil {
			return err
		}
	}

	klog.Background().Info("Starting talos-ccm", "version", version.Version())

	app, err := ccm.New(options)
	if err != nil {
		return err
	}

	err = app.Run(ctx)

	if restart := (*ccm.RestartError)(nil); errors.As(err, &restart) && ctx.Err() != nil {
		return nil // the signal arrived first, and a new process image would not receive it
	}

	return err
}
