// Command talos-ccm is a cloud controller manager for Talos Linux that runs as a Talos system extension.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"regexp"
	"strings"
	"syscall"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	cliflag "k8s.io/component-base/cli/flag"
	"k8s.io/component-base/cli/globalflag"
	"k8s.io/component-base/logs"
	logsapi "k8s.io/component-base/logs/api/v1"
	_ "k8s.io/component-base/metrics/prometheus/clientgo" // client-go's metrics
	_ "k8s.io/component-base/metrics/prometheus/version"  // build information
	"k8s.io/component-base/term"
	"k8s.io/component-base/version/verflag"
	"k8s.io/klog/v2"

	"github.com/talos-ccm/talos-ccm/pkg/ccm"
	"github.com/talos-ccm/talos-ccm/pkg/privilege"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()

	err := run(ctx)
	klog.Flush()

	if err != nil {
		fmt.Fprintln(os.Stderr, "Error:", err)
		os.Exit(1) //nolint:gocritic // the signal handler ends with the process
	}
}

func run(ctx context.Context) error {
	options, err := ccm.NewOptions()
	if err != nil {
		return err
	}

	return newCommand(options).ExecuteContext(ctx)
}

func newCommand(options *ccm.Options) *cobra.Command {
	logOptions := logs.NewOptions()

	cmd := &cobra.Command{
		Use:   "talos-ccm",
		Short: "Cloud controller manager for Talos Linux",
		Long: `talos-ccm initialises the Nodes of Talos machines from what the machines say of themselves.

Every flag can also be set by the environment: --leader-elect is TALOS_CCM_LEADER_ELECT. A flag on the command line wins.`,
		Args:          cobra.NoArgs,
		SilenceUsage:  true,
		SilenceErrors: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := setFromEnvironment(cmd.Flags(), os.Environ()); err != nil {
				return err
			}

			verflag.PrintAndExitIfRequested()

			if err := logsapi.ValidateAndApply(logOptions, utilfeature.DefaultFeatureGate); err != nil {
				return err
			}

			return start(cmd.Context(), options)
		},
	}

	sections := options.Flags()
	global := sections.FlagSet("global")
	verflag.AddFlags(global)
	logsapi.AddFlags(logOptions, global)
	globalflag.AddGlobalFlags(global, cmd.Name(), logs.SkipLoggingConfigurationFlags())

	for _, fs := range sections.FlagSets {
		cmd.Flags().AddFlagSet(fs)
	}

	columns, _, _ := term.TerminalSize(cmd.OutOrStdout())
	cliflag.SetUsageAndHelpFunc(cmd, sections, columns)

	return cmd
}

func start(ctx context.Context, options *ccm.Options) error {
	if err := options.Validate(); err != nil {
		return err
	}

	if options.DropPrivileges {
		if err := privilege.RaiseOpenFiles(); err != nil {
			klog.Background().Info("Going on with fewer open files", "err", err)
		}

		if err := privilege.Drop(options.RunDir); err != nil {
			return err
		}
	}

	app, err := ccm.New(options)
	if err != nil {
		return err
	}

	return app.Run(ctx)
}

const environmentPrefix = "TALOS_CCM_"

// serviceVariable matches what a kubelet sets in containers if there is a Service named talos-ccm.
var serviceVariable = regexp.MustCompile("^" + environmentPrefix + "(SERVICE_(HOST|PORT)|PORT)(_|$)")

// setFromEnvironment sets every flag that the command line has not set from its variable in environ. A variable with the prefix that
// names no flag is an error: it would be a setting that is silently lost.
func setFromEnvironment(flags *pflag.FlagSet, environ []string) error {
	byVariable := map[string]*pflag.Flag{}

	flags.VisitAll(func(f *pflag.Flag) {
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
