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
	"regexp"
	"runtime/debug"
	"slices"
	"strings"
	"syscall"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"google.golang.org/grpc/grpclog"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
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

func init() {
	utilruntime.Must(logsapi.AddFeatureGates(utilfeature.DefaultMutableFeatureGate))
}

func main() {
	// gRPC logs every connection attempt; talos-ccm reports unreachable machines itself, once.
	grpclog.SetLoggerV2(grpclog.NewLoggerV2(io.Discard, io.Discard, os.Stderr))

	executed, err := run(context.Background())
	klog.Flush()

	if errors.Is(err, errDifferent) {
		os.Exit(exitDifferent)
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

// gcPercent makes the heap smaller than Go's default of 100. It costs little CPU time, because most of the heap lives as
// long as the machines are watched.
const gcPercent = 50

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

	cmd, err := newCommand(options, logs.NewOptions()).ExecuteContextC(ctx)

	return cmd.Name(), err
}

// checkEnvironment returns the error with which the process would fail if it were started with args and environ.
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

	return errors.Join(setFromEnvironment(cmd.Flags(), environ), logsapi.Validate(logOptions, utilfeature.DefaultFeatureGate, nil).ToAggregate(), options.Validate())
}

// verbosity is the value of --v.
type verbosity struct{ pflag.Value }

// Set replaces the error of strconv.
func (v verbosity) Set(text string) error {
	if err := v.Value.Set(text); err != nil {
		return errors.New("must be a number such as 4")
	}

	return nil
}

func addLogFlags(flags *pflag.FlagSet, options *logs.Options) {
	logsapi.AddFlags(options, flags)

	level := flags.Lookup("v")
	level.Value = verbosity{level.Value}
}

// maxColumns is the width of the help on wide terminals and in files.
const maxColumns = 100

// helpColumns returns the width of the help.
func helpColumns() int {
	columns, _, _ := term.TerminalSize(os.Stdout)
	if columns == 0 || columns > maxColumns {
		return maxColumns
	}

	return columns
}

func newCommand(options *ccm.Options, logOptions *logs.Options) *cobra.Command {
	all, printVersion := false, false
	sections := options.Flags()
	global := sections.FlagSet("global")
	columns := helpColumns()

	cmd := &cobra.Command{
		Use:   "talos-ccm",
		Short: "Cloud controller manager for Talos Linux",
		Long: `talos-ccm is a cloud controller manager for Talos Linux. It initializes Nodes from the metadata of
their Talos machines, approves the CSRs for kubelet serving certificates, deletes Nodes of machines
that are gone, and optionally allocates pod CIDRs and load balancer addresses.

Without a command, talos-ccm runs the controllers until it receives SIGTERM or SIGINT. The following
commands are read-only:

  talos-ccm config init       Print a commented configuration file to start with
  talos-ccm config validate   Validate configuration files
  talos-ccm config schema     Print the JSON schema of the configuration file
  talos-ccm render            Show what talos-ccm would write to a Node, and the rule of each value
  talos-ccm diff              Compare the Nodes of a cluster with what talos-ccm would write to them
  talos-ccm version           Print the version
  talos-ccm completion        Print a completion script for a shell

--help-all lists all flags. Every flag can also be set by an environment variable:
TALOS_CCM_LEADER_ELECT sets --leader-elect. Flags on the command line take precedence.`,
		SilenceUsage:  true,
		SilenceErrors: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			switch {
			case printVersion:
				_, err := fmt.Fprintln(cmd.OutOrStdout(), "talos-ccm", version.Version())

				return err
			case all:
				cliflag.PrintSections(cmd.OutOrStdout(), sections, columns)

				return nil
			}

			if err := setFromEnvironment(cmd.Flags(), os.Environ()); err != nil {
				return err
			}

			if err := logsapi.ValidateAndApply(logOptions, utilfeature.DefaultFeatureGate); err != nil {
				return err
			}

			if os.Getenv("GOGC") == "" {
				debug.SetGCPercent(gcPercent)
			}

			return start(cmd.Context(), options)
		},
	}

	addLogFlags(global, logOptions)
	globalflag.AddGlobalFlags(global, cmd.Name(), logs.SkipLoggingConfigurationFlags())
	global.BoolVar(&printVersion, "version", false, "Print the version and exit")
	global.BoolVar(&all, "help-all", false, "List all flags and exit")

	for _, fs := range sections.FlagSets {
		cmd.Flags().AddFlagSet(fs)
	}

	cliflag.SetUsageAndHelpFunc(cmd, usual(sections), columns)
	addCommands(cmd)

	return cmd
}

// usualFlags are the flags that --help lists, in addition to those of their own sections.
var usualFlags = []string{
	"allocate-node-cidrs", "cidr-allocator-type", "cloud-config", "cluster-cidr", "controllers", "kube-api-qps", "leader-elect", "leader-elect-resource-name",
	"concurrent-node-syncs", "bind-address", "secure-port", "kubeconfig", "help", "help-all", "v", "version",
}

// usual returns the sections with only the flags that users are likely to need.
func usual(sections cliflag.NamedFlagSets) (result cliflag.NamedFlagSets) {
	for _, name := range sections.Order {
		sections.FlagSets[name].VisitAll(func(f *pflag.Flag) {
			if !f.Hidden && (slices.Contains([]string{"talos", "node IPAM"}, name) || slices.Contains(usualFlags, f.Name)) {
				result.FlagSet(name).AddFlag(f)
			}
		})
	}

	return result
}

// addCommands adds the subcommands. Their help does not list the flags of the root command.
func addCommands(cmd *cobra.Command) {
	plain := new(cobra.Command)

	cmd.AddCommand(newConfigCommand(), newRenderCommand(), newDiffCommand(), &cobra.Command{
		Use:   "version",
		Short: "Print the version",
		Long: `Print the version of talos-ccm, the commit (unless it is a release) and the Go version that it was
built from, and its platform.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			_, err := fmt.Fprintln(cmd.OutOrStdout(), "talos-ccm", version.Details())

			return err
		},
	})
	cmd.InitDefaultCompletionCmd()

	for _, sub := range cmd.Commands() {
		if sub.Name() == "completion" {
			sub.Args, sub.RunE = cobra.NoArgs, func(cmd *cobra.Command, _ []string) error { return cmd.Help() } // refuse unknown shells
		}

		sub.SetUsageFunc(plain.UsageFunc())
		sub.SetHelpFunc(help)
	}
}

// help prints cobra's default help with wrapped flags. cobra can wrap flags only with a template, which would link
// text/template.
func help(cmd *cobra.Command, _ []string) {
	flags := cmd.LocalFlags()
	usage := strings.Replace(cmd.UsageString(), strings.TrimSpace(flags.FlagUsages()), strings.TrimSpace(flags.FlagUsagesWrapped(helpColumns())), 1)

	fmt.Fprintf(cmd.OutOrStdout(), "%s\n\n%s", strings.TrimSpace(cmp.Or(cmd.Long, cmd.Short)), usage)
}

// nothingToRead explains what to do if the command is started by hand.
const nothingToRead = `talos-ccm runs as a Talos system extension, which sets --machine-socket, or as a pod with --talosconfig.
To try it without a cluster:

  talos-ccm config validate FILE                 validate a configuration
  talos-ccm render --node ADDRESS --config FILE  show what talos-ccm would write to the Node of a machine`

// start runs the service until the first signal. A second signal ends the process immediately. The other commands
// install no signal handler.
func start(ctx context.Context, options *ccm.Options) error {
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

// environmentPrefix is the prefix of the environment variables that set flags.
const environmentPrefix = "TALOS_CCM_"

// serviceVariable matches the variables that a kubelet sets in containers for a Service named talos-ccm.
var serviceVariable = regexp.MustCompile("^" + environmentPrefix + "(SERVICE_(HOST|PORT)|PORT)(_|$)")

// setFromEnvironment sets the flags that are not set on the command line from the variables in environ. A variable
// with the prefix and without a flag is an error, so that no setting is silently ignored.
func setFromEnvironment(flags *pflag.FlagSet, environ []string) error {
	var errs []error

	byVariable := map[string]*pflag.Flag{}

	flags.VisitAll(func(f *pflag.Flag) {
		if !slices.Contains([]string{"help", "help-all", "version"}, f.Name) { // these print something and exit
			byVariable[environmentPrefix+strings.ToUpper(strings.ReplaceAll(f.Name, "-", "_"))] = f
		}
	})

	for _, entry := range environ {
		variable, value, _ := strings.Cut(entry, "=")
		if !strings.HasPrefix(variable, environmentPrefix) {
			continue
		}

		f, known := byVariable[variable]

		switch {
		case !known && serviceVariable.MatchString(variable):
		case !known:
			errs = append(errs, fmt.Errorf("environment variable %s: no such flag; see talos-ccm --help-all", variable))
		case f.Changed:
		default:
			if err := flags.Set(f.Name, value); err != nil {
				errs = append(errs, fmt.Errorf("environment variable %s: %w", variable, err))
			}
		}
	}

	return errors.Join(errs...)
}
