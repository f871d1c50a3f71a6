package main

import (
	"fmt"
	"os"
	"strings"

	"github.com/spf13/cobra"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	cliflag "k8s.io/component-base/cli/flag"
	"k8s.io/component-base/cli/globalflag"
	"k8s.io/component-base/logs"
	logsapi "k8s.io/component-base/logs/api/v1"

	"github.com/talos-ccm/talos-ccm/pkg/ccm"
	"github.com/talos-ccm/talos-ccm/pkg/version"
)

// newCommand returns the root command, which runs the service.
func newCommand(options *ccm.Options, logOptions *logs.Options) *cobra.Command {
	all, printVersion := false, false
	sections := options.Flags()
	global := sections.FlagSet("global")
	columns := helpColumns()

	cmd := &cobra.Command{
		Use:           "talos-ccm",
		Short:         "Cloud controller manager for Talos Linux",
		Long:          longHelp,
		Args:          refuseArgs,
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

			return start(cmd.Context(), options)
		},
	}

	logsapi.AddFlags(logOptions, global)
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

// addCommands adds the subcommands. Their help does not list the flags of the root command.
func addCommands(cmd *cobra.Command) {
	plain := new(cobra.Command)

	cmd.AddCommand(newConfigCommand(), newRenderCommand(), newDiffCommand(), newStatusCommand(), &cobra.Command{
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
			sub.Args, sub.RunE = refuseArgs, func(cmd *cobra.Command, _ []string) error { return cmd.Help() } // refuse unknown shells
		}

		sub.ValidArgsFunction = cobra.NoFileCompletions
		sub.SetUsageFunc(plain.UsageFunc())
		sub.SetHelpFunc(help)
	}
}

// refuseArgs refuses arguments that are not subcommands, and suggests similar ones.
func refuseArgs(cmd *cobra.Command, args []string) error {
	cmd.SuggestionsMinimumDistance = 2 // cobra's default

	err := cobra.NoArgs(cmd, args)
	if err == nil {
		return nil
	}

	if similar := cmd.SuggestionsFor(args[0]); len(similar) > 0 {
		return fmt.Errorf("%w; did you mean %s?", err, strings.Join(similar, " or "))
	}

	return err
}
