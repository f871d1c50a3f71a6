// Command talos-ccm is a cloud controller manager for Talos Linux that runs as a Talos system extension.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"regexp"
	"strings"
	"syscall"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"google.golang.org/grpc/grpclog"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	cliflag "k8s.io/component-base/cli/flag"
	"k8s.io/component-base/cli/globalflag"
	"k8s.io/component-base/logs"
	logsapi "k8s.io/component-base/logs/api/v1"
	_ "k8s.io/component-base/metrics/prometheus/clientgo" // client-go's metrics
	"k8s.io/component-base/term"
	"k8s.io/klog/v2"

	"github.com/talos-ccm/talos-ccm/pkg/ccm"
	"github.com/talos-ccm/talos-ccm/pkg/privilege"
	"github.com/talos-ccm/talos-ccm/pkg/version"
)

func main() {
	// gRPC says something of every attempt to connect. That a machine does not answer we say ourselves, once.
	grpclog.SetLoggerV2(grpclog.NewLoggerV2(io.Discard, io.Discard, os.Stderr))

	err := run(context.Background())
	klog.Flush()

	if restart := (*ccm.RestartError)(nil); errors.As(err, &restart) {
		err = replace(restart.Environment)
	}

	if err != nil {
		fmt.Fprintln(os.Stderr, "Error:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context) error {
	options, err := ccm.NewOptions()
	if err != nil {
		return err
	}

	options.Environment = os.Environ()
	options.CheckEnvironment = func(environ []string) error { return checkEnvironment(os.Args[1:], environ) }

	return newCommand(options, logs.NewOptions()).ExecuteContext(ctx)
}

// replace has the process start over with another environment, in place: as a new process it would not be the one that Talos supervises.
func replace(environ []string) error {
	path, err := os.Executable()
	if err != nil {
		return fmt.Errorf("start over: %w", err)
	}

	if err := syscall.Exec(path, os.Args, environ); err != nil {
		return fmt.Errorf("start over: %w", err)
	}

	return nil
}

// checkEnvironment says whether the process could be started with args and environ, and would then run.
func checkEnvironment(args, environ []string) error {
	options, err := ccm.NewOptions()
	if err != nil {
		return err
	}

	logOptions := logs.NewOptions()
	cmd := newCommand(options, logOptions)

	if err := cmd.ParseFlags(args); err != nil {
		return err
	}

	if err := setFromEnvironment(cmd.Flags(), environ); err != nil {
		return err
	}

	return errors.Join(logsapi.Validate(logOptions, utilfeature.DefaultFeatureGate, nil).ToAggregate(), options.Validate())
}

func newCommand(options *ccm.Options, logOptions *logs.Options) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "talos-ccm",
		Short: "Cloud controller manager for Talos Linux",
		Long: `talos-ccm initializes the Nodes of Talos machines from what the machines say of themselves, approves their kubelets' serving certificates and
allocates their pod CIDRs. Without a command it runs until it is told to end. The commands only look:

  talos-ccm config validate|schema   check a configuration file, or describe its format
  talos-ccm render                   show what a Node would get, and which rule sets what
  talos-ccm version                  say which version this is

Every flag can also be set by the environment: --leader-elect is TALOS_CCM_LEADER_ELECT. A flag on the command line wins.`,
		Version:       version.Version(),
		Args:          cobra.NoArgs,
		SilenceUsage:  true,
		SilenceErrors: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := setFromEnvironment(cmd.Flags(), os.Environ()); err != nil {
				return err
			}

			if err := logsapi.ValidateAndApply(logOptions, utilfeature.DefaultFeatureGate); err != nil {
				return err
			}

			return start(cmd.Context(), options)
		},
	}

	sections := options.Flags()
	global := sections.FlagSet("global")
	logsapi.AddFlags(logOptions, global)
	globalflag.AddGlobalFlags(global, cmd.Name(), logs.SkipLoggingConfigurationFlags())

	global.Bool("version", false, "print the version and end")

	for _, fs := range sections.FlagSets {
		cmd.Flags().AddFlagSet(fs)
	}

	cmd.SetVersionTemplate("talos-ccm {{.Version}}\n")
	columns, _, _ := term.TerminalSize(cmd.OutOrStdout())
	cliflag.SetUsageAndHelpFunc(cmd, sections, columns)
	addCommands(cmd, newConfigCommand(), newRenderCommand(), newVersionCommand())

	return cmd
}

func newVersionCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "version",
		Short: "Say which version of talos-ccm this is",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			_, err := fmt.Fprintln(cmd.OutOrStdout(), "talos-ccm", version.Version())

			return err
		},
	}
}

// addCommands adds sub-commands, whose help is their own and not the flags of the whole.
func addCommands(cmd *cobra.Command, commands ...*cobra.Command) {
	plain := new(cobra.Command)

	for _, sub := range commands {
		sub.SetUsageFunc(plain.UsageFunc())
		sub.SetHelpFunc(plain.HelpFunc())
		cmd.AddCommand(sub)
	}
}

// start runs the service until the first signal. A second one ends the process at once; so does the first one of the other commands, which only read.
func start(ctx context.Context, options *ccm.Options) error {
	ctx, stop := signal.NotifyContext(ctx, syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	defer context.AfterFunc(ctx, stop)()

	if err := options.Validate(); err != nil {
		return err
	}

	if options.DropPrivileges {
		if err := privilege.RaiseOpenFiles(); err != nil {
			klog.Background().Info("Going on with fewer open files", "err", err)
		}

		if err := privilege.Drop(options.Folders()...); err != nil {
			return err
		}
	}

	klog.Background().Info("Starting", "version", version.Version())

	app, err := ccm.New(options)
	if err != nil {
		return err
	}

	err = app.Run(ctx)

	if restart := (*ccm.RestartError)(nil); errors.As(err, &restart) && ctx.Err() != nil {
		return nil // told to end meanwhile: nobody would tell the next one
	}

	return err
}

const environmentPrefix = "TALOS_CCM_"

// serviceVariable matches what a kubelet sets in containers if there is a Service named talos-ccm.
var serviceVariable = regexp.MustCompile("^" + environmentPrefix + "(SERVICE_(HOST|PORT)|PORT)(_|$)")

// setFromEnvironment sets every flag that the command line has not set from its variable in environ. A variable with the prefix that
// names no flag is an error: it would be a setting that is silently lost.
func setFromEnvironment(flags *pflag.FlagSet, environ []string) error {
	byVariable := map[string]*pflag.Flag{}

	flags.VisitAll(func(f *pflag.Flag) {
		if f.Name == "help" || f.Name == "version" {
			return // they are no settings: they print something and end
		}

		byVariable[environmentPrefix+strings.ToUpper(strings.ReplaceAll(f.Name, "-", "_"))] = f
	})

	var errs []error

	for _, entry := range environ {
		variable, value, _ := strings.Cut(entry, "=")
		if !strings.HasPrefix(variable, environmentPrefix) {
			continue
		}

		f, known := byVariable[variable]

		switch {
		case !known && serviceVariable.MatchString(variable):
		case !known:
			errs = append(errs, fmt.Errorf("environment variable %s: there is no such flag", variable))
		case f.Changed:
		default:
			if err := flags.Set(f.Name, value); err != nil {
				errs = append(errs, fmt.Errorf("environment variable %s: %w", variable, err))
			}
		}
	}

	return errors.Join(errs...)
}
