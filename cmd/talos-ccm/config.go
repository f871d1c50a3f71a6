package main

import (
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/spf13/cobra"

	"github.com/talos-ccm/talos-ccm/pkg/config"
)

// newConfigCommand is for people who write a configuration file, and for their pipelines.
func newConfigCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "config",
		Short: "Check a configuration file before it is used",
		Args:  cobra.NoArgs,
		RunE:  func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(newConfigValidateCommand(), newConfigSchemaCommand())

	return cmd
}

func newConfigValidateCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "validate FILE|-",
		Short: "Tell every mistake in a configuration file, with its line",
		Long: `validate reads a configuration file, or standard input, exactly as talos-ccm does. It prints a summary and ends with 0 if there is no mistake.
Otherwise it prints every mistake to standard error, one a line, and ends with 1.`,
		Args:          cobra.ExactArgs(1),
		SilenceUsage:  true,
		SilenceErrors: true,
		RunE: func(cmd *cobra.Command, args []string) error {
			name, data, err := readConfig(cmd.InOrStdin(), args[0])
			if err != nil {
				return err
			}

			compiled, err := config.Parse(name, data)
			if mistakes, found := errors.AsType[*config.Error](err); found {
				fmt.Fprintln(cmd.ErrOrStderr(), mistakes)

				return fmt.Errorf("%s is no valid configuration", name)
			}

			if err != nil {
				return err
			}

			fmt.Fprintf(cmd.OutOrStdout(), "%s: %s\n", name, compiled)

			return nil
		},
	}
}

func newConfigSchemaCommand() *cobra.Command {
	return &cobra.Command{
		Use:           "schema",
		Short:         "Print the JSON schema of the configuration file, for editors",
		Args:          cobra.NoArgs,
		SilenceUsage:  true,
		SilenceErrors: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			_, err := cmd.OutOrStdout().Write(config.Schema)

			return err
		},
	}
}

// readConfig reads one byte more than a configuration may have, and leaves it to the parser to refuse that.
func readConfig(stdin io.Reader, file string) (name string, data []byte, err error) {
	name, reader := "stdin", stdin

	if file != "-" {
		f, err := os.Open(file)
		if err != nil {
			return file, nil, err
		}
		defer f.Close() //nolint:errcheck // nothing was written

		name, reader = file, f
	}

	if data, err = io.ReadAll(io.LimitReader(reader, config.MaxSize+1)); err != nil {
		return name, nil, err
	}

	return name, data, config.CheckNotEmpty(name, data)
}
